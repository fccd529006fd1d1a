"""What each rank's memory will hold, told before launch."""
