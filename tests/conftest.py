"""What all tests share."""

from hypothesis import settings

# A machine that others use as well may take any time for an example.
settings.register_profile("timelyfreeze", deadline=None)
settings.load_profile("timelyfreeze")
