"""Pictures with labels, and the place of each, for messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from os.path import isfile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.rows.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

# What is read; Pillow would start programs for others, such as Ghostscript for EPS.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Numbers of more than 8 bits, which Pillow would cut off at 255.
_LARGER = ("I", "F")
# That many are looked at in a second or so.
_MOST_HEADERS = 10_000


class ImageError(DataError):
    """A picture or its label cannot be used; the message says which and why."""


@dataclass(frozen=True)
class ImageExamples:
    """The pictures of a data set.

    Attributes:
        images: For each the path of its file, or a row of ``column`` as ``datasets`` gives it:
            bytes and path.
        labels: int64, [n].
        names: Of the classes, in the order of their labels; empty where the data has none.
        files: ``(name, rows)`` of each file or hub name in order; none where each picture is one.
        column: That of the pictures.
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
        row = index
        for name, count in self.files:
            if row < count:
                return f"{name}, row {row}"
            row -= count
        raise IndexError(f"there is no picture {index}; the data set has {len(self)}")

    def picture(self, index: int) -> Image.Image:
        """Return a picture in red, green and blue, upright, as ``datasets`` turns it.

        Raises:
            ImageError: If it cannot be read.
        """
        from PIL import ImageOps

        with self._opened(index) as image:
            try:
                image.load()  # which turns some formats
                return ImageOps.exif_transpose(image).convert("RGB")
            # Decoders of damaged files raise errors of any kind.
            except Exception as error:
                raise self._damaged(index, error) from error

    def check_header(self, index: int) -> None:
        """Raise ImageError unless the picture at ``index`` begins like one that can be read."""
        self._opened(index).close()

    def _opened(self, index: int) -> Image.Image:
        # Imported here: a configuration is read without Pillow.
        from PIL import Image

        try:
            image = Image.open(self._source(index), formats=FORMATS)
        except ImageError:
            raise
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
    """Raise if a label is out of range.

    Args:
        examples: The data set.
        classes: Number of classes, at least 1.

    Raises:
        ImageError: Naming the first such picture.
    """
    wrong = np.flatnonzero((examples.labels < 0) | (examples.labels >= classes))
    if len(wrong):
        first = int(wrong[0])
        raise ImageError(
            f"{examples.place(first)}: the label is {examples.labels[first]}; with {classes} "
            f"classes (vision.classes) it must lie in [0, {classes})"
        )


def check_headers(examples: ImageExamples) -> int:
    """Look at the beginning of pictures: all, or of more than 10,000 as many, evenly taken.

    Returns:
        How many were looked at; the others are told when they are read.

    Raises:
        ImageError: Naming the first that is none.
    """
    step = -(-len(examples) // _MOST_HEADERS)
    for index in range(0, len(examples), step):
        examples.check_header(index)
    return len(range(0, len(examples), step))
