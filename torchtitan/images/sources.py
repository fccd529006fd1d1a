"""Where pictures come from: a folder for each class, parquet files, or a name on the hub."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchtitan.tools.logging import logger

from torchtitan.data.rows.errors import DataError
from torchtitan.data.rows.examples import is_local_path
from torchtitan.images.examples import FORMATS, ImageError, ImageExamples

PARQUET = ".parquet"


@dataclass(frozen=True)
class ImagePlace:
    """What names a set of pictures.

    Attributes:
        path: A folder, a parquet file, a pattern of such, or a hub name.
        key: Config key that holds it, for messages.
        image_column: Of the pictures.
        label_column: Of the labels.
        subset: For the hub; "" for the default.
        split: For the hub.
    """

    path: str
    key: str
    image_column: str = "image"
    label_column: str = "label"
    subset: str = ""
    split: str = "train"

    @property
    def is_local(self) -> bool:
        """Whether it lies on this disk.

        Raises:
            FileNotFoundError: If it looks like a path and is not there.
        """
        return is_pattern(self.path) or is_local_path(self.path, key=self.key)

    @property
    def identity(self) -> tuple[str, ...]:
        """The same for two places that hold the same pictures."""
        local = os.path.expanduser(self.path)
        if is_pattern(local) or os.path.exists(local):
            return (os.path.realpath(local),)
        return self.path, self.subset, self.split


def is_pattern(path: str) -> bool:
    """Return whether a path stands for files that match it."""
    return glob.has_magic(path) and not os.path.exists(os.path.expanduser(path))


def read_images(place: ImagePlace, names: Sequence[str] = ()) -> ImageExamples:
    """Read where pictures are, and their labels; no picture is decoded.

    Args:
        place: What to read.
        names: Names of the classes of the training data, if it has names. A folder of pictures gets
            its labels from them; without, from its own classes in the order of their names.

    Raises:
        FileNotFoundError: If a local path does not exist, or has no pictures.
        DataError: If a class is not one of ``names``, columns are missing, or labels are no
            numbers.
        ImageError: If a parquet file is damaged.
    """
    if not place.is_local:
        return _read_hub(place, names)
    path = os.path.expanduser(place.path)
    files = _parquet_files(path, place)
    return _read_parquet(files, place, names) if files else _read_folder(Path(path), place, names)


def _parquet_files(path: str, place: ImagePlace) -> list[str]:
    if is_pattern(path):
        files = sorted(glob.glob(path))
        if not files or not all(file.endswith(PARQUET) for file in files):
            raise FileNotFoundError(
                f"{place.key} is {place.path!r}, which fits {len(files)} files; a pattern must fit "
                f"files that end in {PARQUET}, and only such"
            )
        return files
    if not os.path.isdir(path):
        if not path.endswith(PARQUET):
            raise DataError(
                f"{place.key} is {place.path!r}; a file of pictures must end in {PARQUET}"
            )
        return [path]
    return sorted(entry.path for entry in os.scandir(path) if entry.name.endswith(PARQUET))


def _read_folder(path: Path, place: ImagePlace, names: Sequence[str]) -> ImageExamples:
    from PIL import Image

    folders = sorted(e for e in path.iterdir() if e.is_dir() and not e.name.startswith("."))
    if not folders:
        raise FileNotFoundError(
            f"{place.key} is {place.path!r}, which has neither files that end in {PARQUET} nor "
            "folders; it must have a folder of pictures for each class"
        )
    known = list(names) or [folder.name for folder in folders]
    known_as = Image.registered_extensions().items()
    suffixes = tuple(suffix for suffix, name in known_as if name in FORMATS)
    images: list[str] = []
    labels: list[int] = []
    n_others = 0
    for folder in folders:
        if folder.name not in known:
            raise DataError(
                f"{place.key} is {place.path!r}, whose class {folder.name!r} the training data "
                f"does not have; it has {_shortened(known)}"
            )
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
        files = sorted(e.path for e in entries if e.name.lower().endswith(suffixes) and e.is_file())
        if not files:
            raise FileNotFoundError(
                f"{place.key} is {place.path!r}, whose folder {folder.name!r} has no pictures; "
                "each of its folders must be a class, with the pictures in it"
            )
        n_others += len(entries) - len(files)
        images += files
        labels += [known.index(folder.name)] * len(files)
    others = f"; {n_others} other entries left alone" if n_others else ""
    logger.info(f"{path}: {len(images)} pictures of {len(folders)} classes{others}")
    return ImageExamples(images, np.array(labels, dtype=np.int64), tuple(known))


def _read_parquet(files: Sequence[str], place: ImagePlace, names: Sequence[str]) -> ImageExamples:
    import pyarrow
    import pyarrow.parquet
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    counts = []
    for file in files:
        try:
            if not os.path.isfile(file):
                raise OSError("it is no file")
            parquet = pyarrow.parquet.ParquetFile(file)
        except (pyarrow.ArrowException, OSError) as error:
            raise ImageError(
                f"{file}: is not a readable parquet file ({str(error)[:200]})"
            ) from error
        _require_columns(parquet.schema_arrow.names, place, file)
        counts.append((file, parquet.metadata.num_rows))
    _require_rows(sum(count for _, count in counts), place)
    try:
        rows = load_dataset("parquet", data_files=list(files), split="train")
    except (DatasetGenerationError, pyarrow.ArrowException, OSError) as error:
        why = str(error.__cause__ or error)[:200]
        raise ImageError(f"{place.key} is {place.path!r}, which cannot be read ({why})") from error
    return _examples_of(rows, tuple(counts), place, names)


def _read_hub(place: ImagePlace, names: Sequence[str]) -> ImageExamples:
    from datasets import load_dataset

    logger.info(f"{place.key} {place.path!r} is no file or folder here; loading it from the hub")
    rows = load_dataset(place.path, place.subset or None, split=place.split)
    _require_columns(rows.column_names, place, place.path)
    _require_rows(len(rows), place)
    return _examples_of(rows, ((place.path, len(rows)),), place, names)


def _require_rows(n_rows: int, place: ImagePlace) -> None:
    if not n_rows:
        raise DataError(f"{place.key} is {place.path!r}, which holds no pictures")


def _require_columns(columns: Sequence[str], place: ImagePlace, name: str) -> None:
    for key, column in (
        ("vision.image_column", place.image_column),
        ("vision.label_column", place.label_column),
    ):
        if columns.count(column) != 1:
            raise DataError(f"{key} is {column!r}; {name} has the columns {_shortened(columns)}")


def _examples_of(
    rows: Any, files: tuple[tuple[str, int], ...], place: ImagePlace, names: Sequence[str]
) -> ImageExamples:
    from datasets import ClassLabel, Image

    feature = rows.features[place.label_column]
    own = tuple(feature.names) if isinstance(feature, ClassLabel) else ()
    if own and names and own != tuple(names):
        raise DataError(
            f"{place.key} is {place.path!r}, with the classes {_shortened(own)}; the training data "
            f"has {_shortened(names)}"
        )
    if isinstance(rows.features[place.image_column], Image):
        rows = rows.cast_column(place.image_column, Image(decode=False))
    labels = _labels_of(rows, files, place)
    images = rows.select_columns([place.image_column])
    return ImageExamples(images, labels, own or tuple(names), files, place.image_column)


def _labels_of(
    rows: Any, files: tuple[tuple[str, int], ...], place: ImagePlace
) -> NDArray[np.int64]:
    column = rows.select_columns([place.label_column]).with_format("arrow")[:][place.label_column]
    is_missing = column.is_null().to_numpy()
    if is_missing.any():
        unlabeled = ImageExamples(rows, np.zeros(len(rows), np.int64), files=files)
        first = int(np.flatnonzero(is_missing)[0])
        raise ImageError(f"{unlabeled.place(first)}: there is no label ({place.label_column!r})")
    labels = column.to_numpy()
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"vision.label_column is {place.label_column!r}, which holds {column.type}; labels "
            "must be whole numbers from 0"
        )
    return labels.astype(np.int64)


def _shortened(names: Sequence[str]) -> str:
    return ", ".join([*names[:8], "..."] if len(names) > 8 else names)
