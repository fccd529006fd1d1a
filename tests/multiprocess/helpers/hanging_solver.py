"""A solver that never comes back; in a file of its own, for the process it runs in to import."""

import time


def hang(**_):
    time.sleep(3600)
