"""Pictures and files of pictures with any bytes in them: told by file and row, or read."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

pytest.importorskip("PIL", reason="Pillow is not installed: the extra vision has it")

from PIL import Image

from tests.fuzz.mangling import fuzzed, mangled_bytes, message_of
from tests.tools.make_assets.pictures import pixels, png, rows, write_parquet
from torchtitan.images.sources import ImageError, ImageExamples, ImagePlace, read_images


def _jpeg() -> bytes:
    stream = BytesIO()
    Image.fromarray(pixels(0, 0, 8)).save(stream, format="JPEG")
    return stream.getvalue()


@fuzzed(150)
@given(data=mangled_bytes(png(0, 0, 8)) | mangled_bytes(_jpeg()))
def test_a_picture_is_read_or_named(data: bytes) -> None:
    images = ImageExamples([data], np.zeros(1, np.int64), files=(("rows.parquet", 1),))
    message = message_of(lambda: images.picture(0), refusals=(ImageError,))
    assert message is None or message.startswith("rows.parquet, row 0: is not a readable picture (")


@pytest.mark.slow
def test_a_parquet_file_that_was_cut_or_zeroed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    good = write_parquet(tmp_path / "good.parquet", list(rows(2, 2, 8))).read_bytes()
    path = tmp_path / "bad.parquet"
    for number in range(20):
        at = len(good) * number // 20
        for data in (good[:at], good[:at] + bytes(40) + good[at + 40 :]):
            path.write_bytes(data)

            def read() -> None:
                images = read_images(ImagePlace(str(path), "training.dataset_path"))
                for index in range(len(images)):
                    images.picture(index)

            message = message_of(read, refusals=(ImageError, ValueError))
            assert message is None or str(path) in message or "vision." in message
