"""Small pictures that a model can tell apart: stripes, of another slope and color in each class."""

from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

SEED = 20260


def pixels(label: int, number: int, size: int = 32) -> np.ndarray:
    """Uint8 [size, size, 3] of the picture ``number`` of a class."""
    rng = np.random.default_rng([SEED, label, number])
    down, across = np.mgrid[:size, :size]
    slope = label * 2.4  # the golden angle, so that neighbours differ
    wave = np.cos(slope) * down + np.sin(slope) * across + rng.uniform(0, size)
    colors = 0.5 + 0.5 * np.cos(label * 1.7 + np.array([0, 2.1, 4.2]))
    clean = (0.5 + 0.5 * np.sin(wave[..., None] * 0.8)) * colors
    return (255 * np.clip(clean + rng.normal(0, 0.1, clean.shape), 0, 1)).astype(np.uint8)


def png(label: int, number: int, size: int = 32) -> bytes:
    """Return the same as a file."""
    from PIL import Image

    stream = BytesIO()
    Image.fromarray(pixels(label, number, size)).save(stream, format="PNG")
    return stream.getvalue()


def rows(classes: int, per_class: int, size: int = 32) -> Iterator[tuple[bytes, int]]:
    """Yield pictures with their labels, sorted by class."""
    for label in range(classes):
        for number in range(per_class):
            yield png(label, number, size), label


def ppm(label: int, number: int, size: int = 16) -> bytes:
    """Return the same as a file whose bytes no library decides."""
    return b"P6 %d %d 255\n" % (size, size) + pixels(label, number, size).tobytes()


def write_tiny(folder: Path, classes: int = 10) -> None:
    """Write ``tiny_pictures``: in each class 16 pictures to learn from, and 8 others."""
    for name, numbers in {"train": range(16), "test": range(16, 24)}.items():
        table = [(ppm(label, n), label) for label in range(classes) for n in numbers]
        write_parquet(folder / f"tiny_pictures/{name}.parquet", table)


def write_folder(folder: Path, classes: int, per_class: int, size: int = 32) -> Path:
    """Write a folder for each class, ``class_0`` and so on; return the folder of all."""
    for number, (data, label) in enumerate(rows(classes, per_class, size)):
        path = folder / f"class_{label}" / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_parquet(path: Path, table: Sequence[tuple[bytes | None, int | None]]) -> Path:
    """Write pictures and labels with the columns ``image``, of bytes and path, and ``label``."""
    import pyarrow
    import pyarrow.parquet

    images = [None if data is None else {"bytes": data, "path": None} for data, _ in table]
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    columns = {
        "image": pyarrow.array(images, kind),
        "label": pyarrow.array([label for _, label in table], pyarrow.int64()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path
