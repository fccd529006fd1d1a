"""Sources of pictures: a folder per class, parquet files, or a name on the hub."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torchtitan.tools.logging import logger

from timelyfreeze.files import listed
from torchtitan.data.rows.errors import DataError, file_of
from torchtitan.data.rows.examples import PARTS, is_local_path, to_train_on

if TYPE_CHECKING:
    from PIL import Image

PARQUET = ".parquet"


@dataclass(frozen=True)
class ImagePlace:
    """Place of pictures: a folder, parquet files or a hub name; and its key."""

    path: str
    key: str
    image_column: str = "image"
    label_column: str = "label"
    subset: str = ""
    split: str = "train"

    @property
    def is_local(self) -> bool:
        """Whether the place is on this disk; FileNotFoundError for a missing path."""
        return is_pattern(self.path) or is_local_path(self.path, key=self.key)

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal for two places with the same pictures."""
        if is_pattern(self.path) or os.path.exists(self.path):
            return (os.path.realpath(self.path),)
        return self.path, self.subset, self.split

    def __str__(self) -> str:
        """Return key and value, as errors begin."""
        return f"{self.key} is {self.path!r}"


def is_pattern(path: str) -> bool:
    """Return whether a path is a pattern of files."""
    return glob.has_magic(path) and not os.path.exists(path)


def read_images(place: ImagePlace, names: Sequence[str] = ()) -> ImageExamples:
    """Read the places of pictures and their labels; no picture is decoded.

    ``names`` are the training data's classes, if it has names: a folder of pictures gets its labels
    from them; without, from its own classes in the order of their names.
    """
    if not place.is_local:
        from datasets import load_dataset

        logger.info(f"{place}, which is no file or folder here; loading it from the hub")
        rows = load_dataset(place.path, place.subset or None, split=place.split)
        return _examples_of(rows, ((place.path, len(rows)),), place, names)
    files = _parquet_files(place)
    if files:
        return _examples_of(*_read_parquet(files, place), place, names)
    return _read_folder(Path(place.path), place, names)


def _parquet_files(place: ImagePlace) -> list[str]:
    path = place.path
    if is_pattern(path):
        files = sorted(glob.glob(path))
        if not files or not all(file.endswith(PARQUET) for file in files):
            raise FileNotFoundError(
                f"{place}, which fits {len(files)} files; a pattern must fit files that end in "
                f"{PARQUET}, and only such"
            )
        return files
    if not os.path.isdir(path):
        if not path.endswith(PARQUET):
            raise DataError(f"{place}; a file of pictures must end in {PARQUET}")
        return [path]
    found = sorted(f for f in Path(path).glob(f"*{PARQUET}") if not f.name.startswith("."))
    return [str(file) for file in to_train_on(found)]


def _read_folder(path: Path, place: ImagePlace, names: Sequence[str]) -> ImageExamples:
    from PIL import Image

    folders = sorted(e for e in path.iterdir() if e.is_dir() and not e.name.startswith("."))
    if not folders:
        raise FileNotFoundError(
            f"{place}, which has neither files that end in {PARQUET} nor folders; it must have a "
            "folder of pictures for each class"
        )
    known = list(names) or [folder.name for folder in folders]
    known_as = Image.registered_extensions().items()
    suffixes = tuple(suffix for suffix, name in known_as if name in FORMATS)
    images: list[str] = []
    labels: list[int] = []
    if all(folder.name in PARTS for folder in folders):
        raise DataError(
            f"{place}, whose folders {listed([f.name for f in folders])} are parts of a data set; "
            "name the one to read, which has a folder of pictures for each class"
        )
    n_others = 0
    for folder in folders:
        if folder.name not in known:
            raise DataError(
                f"{place}, whose class {folder.name!r} the training data does not have; it has "
                f"{listed(known)}"
            )
        entries = list(_below(folder))
        files = [e for e in entries if e.lower().endswith(suffixes) and isfile(e)]
        if not files:
            raise FileNotFoundError(
                f"{place}, whose folder {folder.name!r} has no pictures; each of its folders must "
                "be a class, with the pictures in it"
            )
        n_others += len(entries) - len(files)
        images += files
        labels += [known.index(folder.name)] * len(files)
    others = f"; {n_others} other entries left alone" if n_others else ""
    logger.info(f"{path}: {len(images)} pictures of {len(folders)} classes{others}")
    return ImageExamples(images, np.array(labels, dtype=np.int64), tuple(known))


def _below(folder: Path) -> Iterator[str]:
    """Yield files below a folder, in torchvision's order, without hidden ones."""
    found = []
    for root, inside, names in os.walk(folder, followlinks=True):
        if os.path.realpath(root) in map(os.path.realpath, Path(root).parents):
            raise DataError(f"{root} is a link to a folder that holds it; remove it")
        inside[:] = [name for name in inside if not name.startswith(".")]
        found.append((root, sorted(name for name in names if not name.startswith("."))))
    for root, names in sorted(found):
        yield from (f"{root}/{name}" for name in names)


# Name and number of rows of each file or hub name.
_Counts = tuple[tuple[str, int], ...]


def _read_parquet(files: Sequence[str], place: ImagePlace) -> tuple[Any, _Counts]:
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
    if not any(count for _, count in counts):
        raise DataError(f"{place}, which holds no pictures")
    try:
        return load_dataset("parquet", data_files=list(files), split="train"), tuple(counts)
    except (DatasetGenerationError, pyarrow.ArrowException, OSError) as error:
        why = str(error.__cause__ or error)[:200]
        raise ImageError(f"{place}, which cannot be read ({why})") from error


def _require_columns(columns: Sequence[str], place: ImagePlace, name: str) -> None:
    for key, column in (
        ("vision.image_column", place.image_column),
        ("vision.label_column", place.label_column),
    ):
        if columns.count(column) != 1:
            raise DataError(f"{key} is {column!r}; {name} has the columns {listed(columns)}")


def _examples_of(
    rows: Any, files: _Counts, place: ImagePlace, names: Sequence[str]
) -> ImageExamples:
    from datasets import ClassLabel, Image

    _require_columns(rows.column_names, place, place.path)
    feature = rows.features[place.label_column]
    own = tuple(feature.names) if isinstance(feature, ClassLabel) else ()
    if own and names and own != tuple(names):
        raise DataError(
            f"{place}, with the classes {listed(own)}; the training data has {listed(names)}"
        )
    if isinstance(rows.features[place.image_column], Image):
        rows = rows.cast_column(place.image_column, Image(decode=False))
    column = rows.select_columns([place.label_column]).with_format("arrow")[:][place.label_column]
    labels = column.to_numpy()
    images = rows.select_columns([place.image_column])
    found = ImageExamples(images, labels, own or tuple(names), files, place.image_column)
    missing = np.flatnonzero(column.is_null().to_numpy())
    if len(missing):
        where = found.place(int(missing[0]))
        raise ImageError(f"{where}: there is no label ({place.label_column!r})")
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"vision.label_column is {place.label_column!r}, which holds {column.type}; labels "
            "must be whole numbers from 0"
        )
    return replace(found, labels=labels.astype(np.int64))


# What is read; Pillow would start programs for others, such as Ghostscript for EPS.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Numbers of more than 8 bits, which Pillow would cut off at 255.
_LARGER = ("I", "F")
# That many are looked at in a second or so.
_MOST_HEADERS = 10_000


class ImageError(DataError):
    """A picture or its label cannot be used; the message names picture and reason."""


@dataclass(frozen=True)
class ImageExamples:
    """The pictures of a data set.

    A picture is the path of its file, or a row of ``column`` from ``datasets``: bytes and path.
    Labels are int64, [n]; ``names`` of the classes, in the order of labels, may be missing.
    ``files`` has ``(name, rows)`` of files or hub names in order; empty if pictures are files.
    """

    images: Sequence[Any]
    labels: NDArray[np.int64]
    names: tuple[str, ...] = ()
    files: tuple[tuple[str, int], ...] = ()
    column: str = ""

    def __len__(self) -> int:
        """Count the pictures."""
        return len(self.labels)

    @property
    def classes(self) -> int:
        """How many classes the data speaks of."""
        return len(self.names) or int(self.labels.max()) + 1

    def place(self, index: int) -> str:
        """Return where the picture at ``index`` is: its file, or file and row."""
        if not self.files:
            return str(self.images[index])
        name, row = file_of(self.files, index)
        return f"{name}, row {row}"

    def picture(self, index: int) -> Image.Image:
        """Return a picture in red, green and blue, upright, as turned by ``datasets``."""
        from PIL import ImageOps

        with self.opened(index) as image:
            try:
                image.load()  # which turns some formats
                return ImageOps.exif_transpose(image).convert("RGB")
            # Decoders of damaged files raise errors of any kind.
            except Exception as error:
                raise self._damaged(index, error) from error

    def opened(self, index: int) -> Image.Image:
        """Return a picture with only its header read."""
        # Imported here: a configuration is read without Pillow.
        from PIL import Image

        source = self._source(index)
        try:
            image = Image.open(source, formats=FORMATS)
        except Exception as error:
            raise self._damaged(index, error) from error
        if image.mode.startswith(_LARGER):
            image.close()
            raise ImageError(
                f"{self.place(index)}: has more than 8 bits a pixel and color (Pillow's mode "
                f"{image.mode!r}); scale it to 8 bits"
            )
        return image

    def _source(self, index: int) -> Any:
        image = self.images[index]
        if isinstance(image, dict) and self.column in image:
            image = image[self.column]
        if isinstance(image, dict):
            # Of a data set that was made of files, only their paths may be kept.
            image = image["path"] if image.get("bytes") is None else image["bytes"]
        if isinstance(image, bytes):
            return BytesIO(image)
        if image is None:
            raise ImageError(f"{self.place(index)}: there is no picture")
        if not isfile(image):  # a pipe would never end
            raise ImageError(f"{self.place(index)}: is not a readable picture (no file {image!r})")
        return image

    def _damaged(self, index: int, error: Exception) -> ImageError:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        if "cannot identify image file" in why:  # with the address of a buffer behind it
            why = "no known format"
        return ImageError(f"{self.place(index)}: is not a readable picture ({why})")


def check_labels(examples: ImageExamples, classes: int) -> None:
    """Raise ImageError, naming the first picture, if a label is out of range."""
    wrong = np.flatnonzero((examples.labels < 0) | (examples.labels >= classes))
    if len(wrong):
        first = int(wrong[0])
        raise ImageError(
            f"{examples.place(first)}: the label is {examples.labels[first]}; with {classes} "
            f"classes (vision.classes) it must lie in [0, {classes})"
        )


def check_headers(examples: ImageExamples) -> int:
    """Look at the beginnings of at most 10,000 pictures, evenly taken; return how many."""
    indices = range(0, len(examples), -(-len(examples) // _MOST_HEADERS))
    for index in indices:
        examples.opened(index).close()
    return len(indices)
