"""Files of a run, read and written as plain values.

No torch and no matplotlib: what draws or compares runs needs neither a device nor the run.
"""
