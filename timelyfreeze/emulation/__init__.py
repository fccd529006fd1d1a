"""A pipeline whose ranks take turns on one device."""
