"""Which places a configuration reads, and what it reads there."""

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.torchtitan.helpers.job_configs import make_job_config
from torchtitan.data.rows.errors import DataExampleError
from torchtitan.data.rows.examples import HubPart
from torchtitan.data.sources import (
    ALL_EXAMPLES,
    DataSource,
    read_sources,
    reads_training_data,
    training_sources,
    validation_sources,
)
from torchtitan.settings import JobConfig

SHARED = Path(__file__).parents[4] / "shared" / "data" / "instruct"
ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
CHAT = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}


def config(**changes: Any) -> JobConfig:
    values = {"training__dataset": "auto", "validation__dataset": "auto", **changes}
    return make_job_config(**values)


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_single_place_and_the_default_of_a_kind() -> None:
    assert training_sources(config(training__dataset_path="rows")) == (DataSource("auto", "rows"),)
    (default,) = training_sources(config(training__dataset="ShareGPT"))
    assert (default.kind, default.path) == ("sharegpt", "teknium/OpenHermes-2.5")
    assert training_sources(config(training__dataset="c4")) == ()


@pytest.mark.parametrize("dataset", ["auto", "messages", "prompt_completion"])
def test_kinds_without_data_of_their_own_need_a_place(dataset: str) -> None:
    with pytest.raises(ValueError, match=r"training\.dataset is .*data of its own; set training"):
        training_sources(config(training__dataset=dataset))
    with pytest.raises(ValueError, match=r"validation\.dataset is .*; set validation\.dataset_p"):
        validation_sources(config(training__dataset="alpaca", validation__dataset=dataset))


def test_values_for_each_place_and_for_all() -> None:
    job_config = config(
        data__paths=["a/b", "c/d"],
        data__weights=[2.0, 0.5],
        data__subset=["en", ""],
        data__split="train_sft",
    )
    first, second = training_sources(job_config)
    assert (first.weight, second.weight) == (2.0, 0.5)
    assert first.part == HubPart("en", "train_sft")
    assert second.part == HubPart("", "train_sft")
    assert first.key == "data.paths"
    job_config.data.revision = ["v1"]
    with pytest.raises(ValueError, match=r"data\.revision is \['v1'\]; it must have a value for e"):
        training_sources(job_config)


def test_validation_reads_the_places_of_training_each_example_once() -> None:
    job_config = config(data__paths=["a/b", "c/d"], data__weights=[2, 3], data__split="x")
    assert [s.weight for s in validation_sources(job_config)] == [1, 1]
    assert reads_training_data(job_config)
    job_config.validation.dataset_path = "c/d"
    (own,) = validation_sources(job_config)
    assert own.part == HubPart("", "x"), "a place that training reads is read in the same way"
    assert not reads_training_data(job_config), "which is only one of its places"
    job_config.validation.dataset_path = "e/f"
    assert validation_sources(job_config)[0].part == HubPart()


@pytest.mark.parametrize("kind", ["auto", "alpaca"])
def test_validation_without_a_path_reads_that_of_training(kind: str) -> None:
    job_config = config(
        training__dataset=kind, training__dataset_path="a/b", validation__dataset=kind
    )
    assert [source.path for source in validation_sources(job_config)] == ["a/b"]
    assert reads_training_data(job_config)


def test_same_data_is_found_however_it_is_spelled(tmp_path: Path) -> None:
    path = tmp_path / "examples"
    path.mkdir()
    (tmp_path / "link").symlink_to(path)

    def same(dataset: str, place: str | None, other: str, other_place: str | None) -> bool:
        return reads_training_data(
            config(
                training__dataset=dataset,
                training__dataset_path=place,
                validation__dataset=other,
                validation__dataset_path=other_place,
            )
        )

    assert same("alpaca", str(path), "ALPACA", f"{path}/../examples/")
    assert same("alpaca", str(path), "alpaca", str(tmp_path / "link"))
    assert same("sharegpt", None, "sharegpt", "teknium/OpenHermes-2.5")
    assert same("alpaca", "some/name", "alpaca", "some/name")
    assert not same("alpaca", str(path), "sharegpt", str(path))
    assert same("alpaca", str(path), "alpaca", None)
    assert not same("alpaca", str(path), "sharegpt", None)
    assert not same("alpaca", str(path), "alpaca", str(tmp_path))
    assert not same("c4_test", None, "c4_test", None), "no examples to hold out there"


def test_sources_of_several_kinds_are_read_by_their_first_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asked = {"question": "x", "answer": "y", "id": 3}
    files = [
        write(tmp_path / "a.jsonl", [ALPACA, ALPACA]),
        write(tmp_path / "b.jsonl", [CHAT]),
        write(tmp_path / "c.jsonl", [asked, asked]),
    ]
    job_config = config(data__paths=files, data__weights=[1.0, 2.0, 1.0])
    job_config.data.columns.prompt, job_config.data.columns.completion = "question", "answer"
    mixed = read_sources(training_sources(job_config))
    said = [mixed.read(i, lambda found: found.messages[-1].content) for i in range(len(mixed))]
    assert said == ["3", "3", "y", "y", "y"]
    assert mixed.mixed_as == [[2, 1.0], [1, 2.0], [2, 1.0]]
    assert f"{files[0]}: rows of kind 'alpaca', columns instruction, output, input" in caplog.text
    assert f"{files[1]}: rows of kind 'messages', columns messages" in caplog.text
    assert f"{files[2]}: rows of kind 'prompt_completion', columns question (as p" in caplog.text


def test_an_error_names_the_column_as_it_is_called(tmp_path: Path) -> None:
    rows = [{"q": "x", "chat": CHAT["messages"]}, {"q": "x", "chat": [{"role": "user"}]}]
    source = DataSource("auto", write(tmp_path / "a.jsonl", rows), columns=(("messages", "chat"),))
    mixed = read_sources([source])
    with pytest.raises(DataExampleError, match=r"line 2: field 'chat\[0\]\.content' is missing"):
        mixed.read(1, lambda found: found)
    path = write(tmp_path / "b.jsonl", [{"text": "x"}])
    with pytest.raises(DataExampleError, match=r"b\.jsonl, line 1: has the columns \['text'\]"):
        read_sources([DataSource("auto", path)])


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_other_containers_choose_too(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    rows = datasets.Dataset.from_list([{**CHAT, "id": i} for i in range(3)])
    if suffix == "json":
        path.write_text(json.dumps(list(rows)))
    else:
        rows.to_parquet(path)
    mixed = read_sources([DataSource("auto", str(path))])
    assert list(mixed.sources[0].examples) == [CHAT] * 3, "of other columns nothing is kept"
    assert mixed.read(2, lambda found: found.messages[1].content) == "y"


def test_the_part_of_a_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, **part: str) -> datasets.Dataset:
        asked.append((path, part))
        if part["split"] == "none":
            raise ValueError("Unknown split \"none\". Should be one of ['train'].")
        return datasets.Dataset.from_list([{"chat": CHAT["messages"], "id": 1}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    job_config = config(
        data__paths=["owner/a", "owner/b"],
        data__subset=["en", ""],
        data__split=["", "train_sft"],
        data__revision="v1",
    )
    job_config.data.columns.messages = "chat"
    mixed = read_sources(training_sources(job_config))
    assert asked == [
        ("owner/a", {"split": "train", "name": "en", "revision": "v1"}),
        ("owner/b", {"split": "train_sft", "revision": "v1"}),
    ]
    assert mixed.read(1, lambda found: found.messages[1].content) == "y"
    assert list(mixed.worth_a_check()) == [0, 1]
    job_config.data.split = "none"
    with pytest.raises(ValueError, match=r"data\.paths is 'owner/a', .* data\.split 'none'.*Unkn"):
        read_sources(training_sources(job_config))


@pytest.mark.skipif(
    not SHARED.is_dir(),
    reason="needs the folder shared/data/instruct beside the repository (real examples, not ours)",
)
def test_real_rows_of_two_kinds_in_one_epoch() -> None:
    names = [
        "alpaca_gpt4_1k.jsonl",
        "openhermes25_subset_sharegpt.jsonl",
        "sharegpt_gpt4_256.jsonl",
    ]
    job_config = config(
        data__paths=[str(SHARED / name) for name in names], data__weights=[1.0, 0.25, 2.0]
    )
    mixed = read_sources(training_sources(job_config))
    assert len(mixed) == 985 + 2000 + 256
    for index in mixed.worth_a_check():
        assert mixed.read(index, lambda found: found.messages[0].role) in (
            "system",
            "user",
            "assistant",
        )
    assert len(mixed.epoch(ALL_EXAMPLES)) == 985 + 500 + 512
