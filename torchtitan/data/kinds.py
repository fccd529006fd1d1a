"""Which values of ``training.dataset`` are read by loaders of ours; others are upstream's."""

from torchtitan.data.rows.kinds import is_instruct_dataset

IMAGES = "images"


def is_image_dataset(dataset: str) -> bool:
    """Return whether a data set, named in any case, holds pictures and their classes."""
    return dataset.lower() == IMAGES


def has_rows(dataset: str) -> bool:
    """Return whether a data set has numbered examples.

    Its epochs have a known length, some examples can be held out, and any number of replicas goes
    on where others have stopped.
    """
    return is_instruct_dataset(dataset) or is_image_dataset(dataset)
