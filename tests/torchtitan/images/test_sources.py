"""Pictures from folders and parquet files, and what is said of broken ones."""

import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from tests.tools.make_assets.pictures import pixels, png, rows, write_folder, write_parquet
from torchtitan.images.sources import (
    ImageError,
    ImageExamples,
    ImagePlace,
    check_headers,
    check_labels,
    read_images,
)

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "vision"


def place(path: Path | str, **columns: str) -> ImagePlace:
    return ImagePlace(str(path), "training.dataset_path", **columns)


def test_a_folder_has_a_class_for_each_of_its_folders(tmp_path: Path) -> None:
    write_folder(tmp_path, 3, 2)
    (tmp_path / "class_1" / "notes.txt").write_text("no picture")
    (tmp_path / "class_1" / "loop.png").symlink_to("loop.png")
    (tmp_path / "loop").symlink_to("loop")
    images = read_images(place(tmp_path))
    assert images.names == ("class_0", "class_1", "class_2")
    assert images.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert np.array_equal(np.asarray(images.picture(3)), pixels(1, 1))
    assert images.place(3) == str(tmp_path / "class_1" / "00003.png")


def test_pictures_in_folders_of_a_class_are_read_as_torchvision_reads_them(tmp_path: Path) -> None:
    write_folder(tmp_path, 2, 2)
    (tmp_path / "class_0" / "more" / "deep").mkdir(parents=True)
    (tmp_path / "class_0" / "00000.png").rename(tmp_path / "class_0" / "more" / "deep" / "x.png")
    (tmp_path / "class_0" / "00001.png").rename(tmp_path / "class_0" / "more" / "y.png")
    expected = pytest.importorskip("torchvision").datasets.ImageFolder(str(tmp_path))
    images = read_images(place(tmp_path))
    assert [*zip(images.images, images.labels.tolist(), strict=True)] == expected.samples
    (tmp_path / "class_0" / "more" / "._y.png").write_bytes(b"what another system keeps of it")
    assert len(read_images(place(tmp_path))) == 4
    (tmp_path / "class_0" / "more" / "loop").symlink_to(tmp_path / "class_0")
    with pytest.raises(ValueError, match="loop is a link to a folder that holds it"):
        read_images(place(tmp_path))


def test_a_folder_to_validate_on_gets_the_labels_of_training(tmp_path: Path) -> None:
    write_folder(tmp_path, 3, 1)
    images = read_images(place(tmp_path), ["class_2", "class_x", "class_0", "class_1"])
    assert images.labels.tolist() == [2, 3, 0]
    assert images.classes == 4
    with pytest.raises(ValueError, match="class 'class_1' the training data does not have"):
        read_images(place(tmp_path), ["class_0", "class_2"])


def test_parquet_files_follow_each_other_and_name_their_rows(tmp_path: Path) -> None:
    table = list(rows(2, 3))
    write_parquet(tmp_path / "train-0.parquet", table[:4])
    write_parquet(tmp_path / "train-1.parquet", table[4:])
    write_parquet(tmp_path / "test-0.parquet", table[:1])
    images = read_images(place(tmp_path / "train-*.parquet"))
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert images.names == ()
    assert images.classes == 2
    assert np.array_equal(np.asarray(images.picture(4)), pixels(1, 1))
    assert images.place(4) == f"{tmp_path / 'train-1.parquet'}, row 0"
    write_parquet(tmp_path / "._train-0.parquet", table[:1])
    assert len(read_images(place(tmp_path))) == 6  # datasets takes the part to train on
    assert len(read_images(place(tmp_path / "test-0.parquet"))) == 1


def test_columns_have_the_names_that_are_told(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", list(rows(2, 1)))
    with pytest.raises(ValueError, match=r"vision\.image_column is 'img'; .* image, label"):
        read_images(place(path, image_column="img"))
    with pytest.raises(ValueError, match=r"vision\.label_column is 'image', which holds struct"):
        read_images(place(path, label_column="image"))


def test_pictures_of_any_mode_become_red_green_and_blue(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "gray").mkdir()
    Image.new("L", (5, 4), 7).save(tmp_path / "gray" / "a.png")
    Image.new("RGBA", (5, 4), (1, 2, 3, 0)).save(tmp_path / "gray" / "b.png")
    images = read_images(place(tmp_path))
    assert np.array_equal(np.asarray(images.picture(0)), np.full((4, 5, 3), 7))
    assert np.asarray(images.picture(1))[0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("data", "why", "by_its_header"),
    [
        (b"no picture", "is not a readable picture (no known format)", True),
        (b"", "is not a readable picture", True),
        (None, "there is no picture", True),
        (png(0, 0)[:60], "is not a readable picture", False),
        (png(0, 0)[:500] + b"\0" * 300, "is not a readable picture", False),
    ],
    ids=["text", "empty", "null", "cut", "zeros"],
)
def test_a_broken_picture_is_named_with_file_and_row(
    tmp_path: Path, data: bytes | None, why: str, by_its_header: bool
) -> None:
    path = write_parquet(tmp_path / "a.parquet", [(png(0, 0), 0), (data, 0)])
    images = read_images(place(path))
    with pytest.raises(ImageError) as error:
        images.picture(1)
    assert str(error.value).startswith(f"{path}, row 1: {why}")
    assert "BytesIO" not in str(error.value)
    if by_its_header:
        with pytest.raises(ImageError) as told:
            check_headers(images)
        assert str(told.value) == str(error.value)
    else:
        assert check_headers(images) == 2


def test_of_many_pictures_as_many_headers_are_looked_at_as_is_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.images.sources._MOST_HEADERS", 4)
    table: list = [(png(0, 0), 0)] * 10
    images = read_images(place(write_parquet(tmp_path / "a.parquet", table)))
    assert check_headers(images) == 4  # 0, 3, 6, 9
    table[9] = (b"", 0)
    images = read_images(place(write_parquet(tmp_path / "b.parquet", table)))
    with pytest.raises(ImageError, match="row 9"):
        check_headers(images)


def test_labels_out_of_range_are_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [(png(0, 0), 0), (png(0, 1), 4), (png(0, 2), -1)])
    images = read_images(place(path))
    with pytest.raises(ImageError, match=r"a\.parquet, row 1: the label is 4; with 4 classes"):
        check_labels(images, 4)
    with pytest.raises(ImageError, match=r"a\.parquet, row 2: the label is -1; with 5 classes"):
        check_labels(images, 5)
    missing = write_parquet(tmp_path / "b.parquet", [(png(0, 0), 0), (png(0, 1), None)])
    with pytest.raises(ImageError, match=r"b\.parquet, row 1: there is no label"):
        read_images(place(missing))


def test_places_that_have_no_pictures_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "outer" / "train").mkdir(parents=True)
    (tmp_path / "outer" / "train" / "cat").mkdir()
    (tmp_path / "text.txt").write_text("")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    write_parquet(tmp_path / "no_rows.parquet", [])
    for name, why in {
        "empty": "neither files that end in .parquet nor folders",
        "outer": "folders train are parts of a data set",
        "text.txt": "must end in .parquet",
        "none.parquet": "no such file",
        "*.png": "fits 0 files",
        "broken.parquet": "is not a readable parquet file",
        "no_rows.parquet": "holds no pictures",
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=why) as error:
            read_images(place(tmp_path / name))
        assert str(tmp_path / name) in str(error.value)


def test_an_error_from_a_worker_loses_its_stack_trace() -> None:
    text = "Caught ImageError in worker 0.\nTraceback:\n  ...\na.b.ImageError: f, row 3: is bad\n"
    assert str(ImageError(text)) == "f, row 3: is bad"
    assert str(ImageError("f, row 3: is bad")) == "f, row 3: is bad"


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/vision has CIFAR-10")
def test_cifar_is_read_and_sorted_by_class() -> None:
    path = SHARED / "cifar10_test.parquet"
    images = read_images(place(path, image_column="img"))
    assert len(images) == 10_000
    assert images.classes == 10
    assert np.bincount(images.labels).tolist() == [1000] * 10
    assert (np.diff(images.labels) >= 0).all()
    assert check_headers(images) == 10_000
    assert images.picture(9_999).size == (32, 32)
    assert images.place(17) == f"{path}, row 17"


def upright(data: bytes) -> np.ndarray:
    """Red, green and blue of a picture as ``datasets`` decodes it."""
    import datasets

    return np.asarray(datasets.Image().decode_example({"bytes": data, "path": None}).convert("RGB"))


def encoded(mode: str, kind: str, orientation: int | None = None) -> bytes:
    """A picture of another width than height, of any mode, whose corners differ."""
    ramp = np.linspace(0, 255, 24 * 16 * 3, dtype=np.uint8).reshape(24, 16, 3)
    buffer = BytesIO()
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    picture = Image.fromarray(ramp)
    picture = picture.convert("L").convert(mode) if mode[0] in "IF" else picture.convert(mode)
    picture.save(buffer, kind, exif=exif)
    return buffer.getvalue()


def test_a_pixel_means_what_it_means_in_datasets(tmp_path: Path) -> None:
    cases = [
        *[("RGB", kind, n) for kind in ("JPEG", "TIFF", "PNG", "WEBP") for n in range(1, 9)],
        ("RGB", "JPEG", 0),
        ("RGB", "JPEG", 9),
        *[(mode, "PNG", None) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")],
        *[(mode, "TIFF", None) for mode in ("1", "L", "P", "CMYK", "YCbCr", "LAB", "RGBX")],
        *[(mode, "JPEG", None) for mode in ("L", "CMYK")],
        *[("RGB", kind, None) for kind in ("BMP", "GIF", "PPM")],
    ]
    files = [encoded(*case) for case in cases]
    (tmp_path / "folder" / "a").mkdir(parents=True)
    for i, (data, case) in enumerate(zip(files, cases, strict=True)):
        (tmp_path / "folder" / "a" / f"{i:02}.{case[1].lower()}").write_bytes(data)
    table = write_parquet(tmp_path / "rows.parquet", [(data, 0) for data in files])
    in_rows, in_folder = read_images(place(table)), read_images(place(tmp_path / "folder"))
    for i, (data, case) in enumerate(zip(files, cases, strict=True)):
        expected = upright(data)
        assert expected.shape == ((16, 24, 3) if case[2] in range(5, 9) else (24, 16, 3)), case
        assert np.array_equal(np.asarray(in_rows.picture(i)), expected), case
        assert np.array_equal(np.asarray(in_folder.picture(i)), expected), case


@pytest.mark.parametrize(("mode", "kind"), [("I;16", "PNG"), ("I", "TIFF"), ("F", "TIFF")])
def test_more_than_8_bits_are_refused_before_they_are_cut_off(
    tmp_path: Path, mode: str, kind: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f"x.{kind.lower()}").write_bytes(encoded(mode, kind))
    with pytest.raises(ImageError, match=r"x\.\w+: has more than 8 bits a pixel and color"):
        check_headers(read_images(place(tmp_path)))


def test_no_program_is_started_and_no_pipe_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "EPS")
    monkeypatch.setattr("subprocess.Popen", None)
    os.mkfifo(tmp_path / "x.png")
    os.mkfifo(tmp_path / "x.parquet")
    (tmp_path / "y.eps").write_bytes(buffer.getvalue())
    pictures = [{"bytes": buffer.getvalue()}, str(tmp_path / "y.eps"), str(tmp_path / "x.png")]
    images = ImageExamples(pictures, np.zeros(3, np.int64), files=(("rows", 3),))
    for row, why in enumerate(["no known format", "no known format", "no file '"]):
        with pytest.raises(ImageError, match=rf"rows, row {row}: is not a readable .* \({why}"):
            images.picture(row)
    with pytest.raises(ImageError, match=r"x\.parquet: is not a readable parquet file \(it is no"):
        read_images(place(tmp_path))
    (tmp_path / "x.parquet").unlink()
    (tmp_path / "a").mkdir()
    (tmp_path / "x.png").rename(tmp_path / "a" / "x.png")
    (tmp_path / "y.eps").rename(tmp_path / "a" / "y.eps")
    with pytest.raises(FileNotFoundError, match="'a' has no pictures"):
        read_images(place(tmp_path))


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    labels = pyarrow.array([1])
    table = pyarrow.Table.from_arrays([labels] * 3, names=["image", "label", "label"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"vision\.label_column is 'label'; .* label, label"):
        read_images(place(tmp_path / "a.parquet"))
