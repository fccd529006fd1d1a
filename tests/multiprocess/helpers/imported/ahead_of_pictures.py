"""Small image classifiers, whose frozen front has to be ahead wherever it may."""

from imported import tiny_images, waits_for_front  # noqa: F401
