"""What a host, and ranks together, lack for a run, told before a queue is waited for."""
