"""What if the first layers were frozen for good: alone, cached, re-split, run ahead of, shrunk."""
