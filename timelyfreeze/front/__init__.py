"""What follows from a frozen front: what is kept of its outputs, and the ranks that it frees."""
