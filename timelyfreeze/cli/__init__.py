"""The command ``timelyfreeze``."""
