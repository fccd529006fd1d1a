"""Small image classifiers, whose activation cache reads whatever that costs."""

from imported import always_reads, tiny_images  # noqa: F401
