"""Batches of pictures: what is in them, in which order, and after a resume by any readers."""

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tools.make_assets.pictures import png, rows, write_folder, write_parquet
from tests.torchtitan.helpers.job_configs import make_job_config
from torchtitan.images.loader import build_image_dataloader, build_validation_dataloader
from torchtitan.images.sources import ImageError
from torchtitan.settings import JobConfig

pytestmark = pytest.mark.slow

pytest.importorskip("torchvision", reason="torchvision is not installed: the extra vision has it")

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "vision"
CLASSES, PER_CLASS = 4, 6
N = CLASSES * PER_CLASS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("pictures"), CLASSES, PER_CLASS, size=16)


def config(path: Path, **values: Any) -> JobConfig:
    return make_job_config(
        **{
            "training__dataset": "images",
            "training__dataset_path": str(path),
            "training__local_batch_size": 3,
            "validation__dataset": "images",
            "validation__local_batch_size": 2,
            "vision__image_size": 16,
            "vision__augmentation": "padded_crop",
            **values,
        }
    )


def loader(job_config: JobConfig, rank: int = 0, n_ranks: int = 1, workers: int = 0) -> Any:
    job_config.training.dataloader.num_workers = workers
    return build_image_dataloader(dp_world_size=n_ranks, dp_rank=rank, job_config=job_config)


def by_row(batches: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Pictures and labels of an epoch's batches."""
    found = {}
    for inputs, labels in batches:
        for row, picture, label in zip(inputs.rows, inputs["input"], labels, strict=True):
            assert int(row) not in found
            found[int(row)] = (picture, label)
    return found


def same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a[0]["input"], b[0]["input"])
        and torch.equal(a[0].rows, b[0].rows)
        and torch.equal(a[1], b[1])
        for a, b in zip(one, other, strict=True)
    )


def test_an_epoch_has_each_picture_once_with_its_label(folder: Path) -> None:
    batches = itertools.islice(loader(config(folder)), N // 3)
    found = by_row(batches)
    assert set(found) == set(range(N))
    assert all(int(label) == row // PER_CLASS for row, (_, label) in found.items())
    picture, label = found[0]
    assert picture.shape == (3, 16, 16)
    assert picture.dtype == torch.float32
    assert label.dtype == torch.int64


def test_the_order_is_the_permutation_of_seed_and_epoch(folder: Path) -> None:
    batches = list(itertools.islice(loader(config(folder, data__seed=9)), 2 * N // 3))
    order = [int(row) for inputs, _ in batches for row in inputs.rows]
    expected = [np.random.default_rng([9, epoch]).permutation(N).tolist() for epoch in (0, 1)]
    assert order == expected[0] + expected[1]
    unshuffled = itertools.islice(loader(config(folder, data__shuffle=False)), N // 3)
    assert [int(row) for inputs, _ in unshuffled for row in inputs.rows] == list(range(N))


def test_a_picture_is_changed_by_seed_epoch_and_row_alone(folder: Path) -> None:
    """Not by the ranks and workers that read it, nor by the order."""

    def epochs(count: int, *args: Any, **values: Any) -> list[Any]:
        batches = iter(loader(config(folder, **values), *args))
        return [by_row(itertools.islice(batches, N // 3)) for _ in range(count)]

    first, second = epochs(2)
    assert not any(torch.equal(first[row][0], second[row][0]) for row in (0, 7, 20))
    for other in (
        epochs(1, 0, 1, 2)[0],
        epochs(1, data__shuffle=False)[0],
    ):
        assert all(torch.equal(first[row][0], other[row][0]) for row in range(N))
    halves = [by_row(itertools.islice(loader(config(folder), rank, 2), N // 6)) for rank in (0, 1)]
    assert not set(halves[0]) & set(halves[1])
    for row, (picture, _) in (halves[0] | halves[1]).items():
        assert torch.equal(picture, first[row][0])
    reseeded = epochs(1, data__seed=1)[0]
    assert not all(torch.equal(first[row][0], reseeded[row][0]) for row in range(N))


@pytest.mark.parametrize(
    ("mixup", "workers"),
    [
        (0.0, 0),
        pytest.param(0.4, 2, marks=pytest.mark.slow),
        pytest.param(0.0, 2, marks=pytest.mark.long),
        pytest.param(0.4, 0, marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_has_the_very_batches(folder: Path, mixup: float, workers: int) -> None:
    def build() -> Any:
        return loader(config(folder, vision__mixup=mixup), workers=workers)

    whole = build()
    batches = iter(whole)
    expected = list(itertools.islice(build(), 30))
    for n_before in (1, 8, 5):  # within, at the end of, and beyond an epoch
        for _ in range(n_before):
            next(batches)
        resumed = build()
        resumed.load_state_dict(whole.state_dict())
        at = sum(n for n in (1, 8, 5)[: (1, 8, 5).index(n_before) + 1])
        assert same(list(itertools.islice(resumed, 6)), expected[at : at + 6])


@pytest.mark.parametrize("resized", [(2, 3, 0, 0), (3, 1, 0, 2), (1, 2, 2, 0)], ids=str)
def test_other_readers_lose_no_picture_and_read_none_twice(
    folder: Path, resized: tuple[int, int, int, int]
) -> None:
    """Against counting: after any change of readers each epoch has each picture once."""
    before, after, workers_before, workers_after = resized
    job_config = config(folder, training__local_batch_size=1)
    readers = [loader(job_config, rank, before, workers_before) for rank in range(before)]
    seen: list[int] = []
    for reader in readers:
        seen += [int(inputs.rows) for inputs, _ in itertools.islice(reader, 4)]
    states = {key: value for reader in readers for key, value in reader.state_dict().items()}
    left = N - len(seen)
    readers = [loader(job_config, rank, after, workers_after) for rank in range(after)]
    for reader in readers:
        reader.load_state_dict(states)
    iterators = [iter(reader) for reader in readers]
    # In turns, as steps take them.
    rest = [int(next(iterators[turn % after])[0].rows) for turn in range(left)]
    if left % (after * max(1, workers_after)) == 0:
        assert Counter(seen + rest) == Counter(range(N))
    else:
        assert max(Counter(seen + rest).values()) == 1


def test_held_out_pictures_are_not_trained_on(folder: Path) -> None:
    from torchtitan.data.sources import ExampleSplit

    job_config = config(folder, data__validation_fraction=0.25, validation__steps=-1)
    trained = by_row(itertools.islice(loader(job_config), 3 * N // 4 // 3))
    held_out = by_row(
        build_validation_dataloader(
            dp_world_size=1,
            dp_rank=0,
            job_config=job_config,
            split=ExampleSplit(0.25, held_out=True),
        )
    )
    assert len(held_out) == N // 4
    assert set(trained) | set(held_out) == set(range(N))


def test_validation_is_in_a_fixed_random_order_without_augmentation(folder: Path) -> None:
    def orders(**values: Any) -> list[int]:
        job_config = config(folder, validation__steps=3, **values)
        built = build_validation_dataloader(dp_world_size=1, dp_rank=0, job_config=job_config)
        runs = [list(itertools.islice(built, 3)) for _ in range(2)]
        assert same(*runs)
        return [int(row) for inputs, _ in runs[0] for row in inputs.rows]

    first = orders()
    assert first == orders(data__seed=5)
    assert len({row // PER_CLASS for row in first}) > 1  # of data sorted by class
    everything = config(folder, validation__steps=-1)
    epoch = by_row(build_validation_dataloader(dp_world_size=1, dp_rank=0, job_config=everything))
    plain = by_row(itertools.islice(loader(config(folder, vision__augmentation="none")), N // 3))
    assert all(torch.equal(epoch[row][0], plain[row][0]) for row in range(N))


def test_mixed_labels_are_shares_of_the_pictures_of_the_batch(folder: Path) -> None:
    job_config = config(folder, vision__mixup=0.5, training__local_batch_size=4)
    plain = itertools.islice(loader(config(folder, training__local_batch_size=4)), 6)
    for (mixed, labels), (inputs, classes) in zip(loader(job_config), plain, strict=False):
        assert labels.shape == (4, CLASSES)
        torch.testing.assert_close(labels.sum(1), torch.ones(4))
        for i in range(4):
            one, other = inputs["input"][i], inputs["input"][i - 1]
            # The share that explains the picture best explains its label as well.
            apart = one - other
            share = float((mixed["input"][i] - other).flatten() @ apart.flatten()) / float(
                apart.flatten() @ apart.flatten()
            )
            expected = torch.zeros(CLASSES)
            expected[classes[i]] += share
            expected[classes[i - 1]] += 1 - share
            torch.testing.assert_close(labels[i], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_picture_that_breaks_while_reading_is_named(tmp_path: Path, workers: int) -> None:
    path = write_parquet(tmp_path / "a.parquet", [(png(0, 0), 0), (png(0, 1)[:60], 0)])
    job_config = config(path, training__local_batch_size=1, data__shuffle=False)
    with pytest.raises(ImageError) as error:
        list(itertools.islice(loader(job_config, workers=workers), 2))
    assert str(error.value).startswith(f"{path}, row 1: is not a readable picture (")


def test_labels_beyond_the_classes_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", list(rows(3, 2)))
    with pytest.raises(ImageError, match=r"row 4: the label is 2; with 2 classes"):
        loader(config(path, vision__classes=2))


def test_fewer_pictures_than_a_batch_are_refused(folder: Path) -> None:
    job_config = config(folder, validation__local_batch_size=N + 1)
    with pytest.raises(ValueError, match=r"validation\.local_batch_size is 25, but a reader has"):
        build_validation_dataloader(dp_world_size=1, dp_rank=0, job_config=job_config)


def test_rows_that_come_next_can_be_looked_at(folder: Path) -> None:
    built = loader(config(folder))
    batches = iter(built)
    next(batches)
    upcoming = built.upcoming(2)
    assert [next(batches)[0].rows.tolist() for _ in range(2)] == upcoming


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/vision has CIFAR-10")
def test_cifar_comes_in_fair_batches() -> None:
    job_config = config(
        SHARED / "cifar10_train.parquet",
        training__local_batch_size=500,
        vision__image_size=32,
        vision__image_column="img",
    )
    inputs, labels = next(iter(loader(job_config, workers=len(os.sched_getaffinity(0)) - 1)))
    assert inputs["input"].shape == (500, 3, 32, 32)
    assert np.bincount(labels, minlength=10).min() > 25  # the file is sorted by class
    assert abs(float(inputs["input"].mean())) < 0.5
    assert 0.5 < float(inputs["input"].std()) < 1.5
