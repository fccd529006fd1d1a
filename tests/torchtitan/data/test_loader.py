"""Loaders of instruction data: batches, workers, resuming, and where examples come from."""

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from tests.torchtitan.helpers.job_configs import make_job_config
from tests.torchtitan.helpers.loaders import ASSETS
from tests.torchtitan.helpers.loaders import build_loader as build
from torchtitan.data.loader import Lookahead
from torchtitan.data.named_templates import build_chat_template
from torchtitan.data.rows.errors import DataExampleError
from torchtitan.data.sequences import IGNORE_INDEX
from torchtitan.data.sources import DataSource, ExampleSplit, training_sources
from torchtitan.data.text.tokenizer import FolderTokenizer


def test_batches_of_the_tiny_set() -> None:
    inputs, labels = next(iter(build()))
    assert inputs["input"].shape == labels.shape == (4, 128)
    assert inputs.n_tokens.shape == (4,)
    assert set(inputs) == {"input"}, "no more goes to a model"
    assert inputs.rows.tolist() == copy.copy(inputs).rows.tolist() == [0, 1, 2, 3]  # torch pins one
    assert inputs.rows.dtype == torch.int64
    assert bool((inputs.n_tokens > 20).all())
    tokenizer = FolderTokenizer(str(ASSETS / "tokenizer"))
    examples = (ASSETS / "tiny_instruct" / "train.jsonl").read_text("utf-8").splitlines()
    answers = [json.loads(example)["output"] for example in examples[:4]]
    for answer, label in zip(answers, labels, strict=True):
        learned = [token for token in label.tolist() if token != IGNORE_INDEX]
        assert tokenizer.decode(learned, skip_special_tokens=False) == f"{answer}<|end|>"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_resumes_in_the_middle_of_an_epoch(workers: int) -> None:
    kwargs = {"sources": [DataSource("sharegpt", str(ASSETS / "tiny_chat"))], "seq_len": 64}
    kwargs |= {
        "shuffle_seed": 5,
        "loading": {"num_workers": workers},
        "dp_world_size": 2,
        "dp_rank": 1,
    }
    loader = build(**kwargs)
    stream = iter(loader)
    for _ in range(25):  # into the second epoch: 75 examples a rank, 4 a batch
        next(stream)
    state = loader.state_dict()
    want = [next(stream) for _ in range(6)]
    resumed = build(**kwargs)
    resumed.load_state_dict(state)
    for (inputs, labels), (again, labels_again) in zip(want, resumed, strict=False):
        assert torch.equal(inputs["input"], again["input"])
        assert torch.equal(inputs.n_tokens, again.n_tokens)
        assert torch.equal(labels, labels_again)


def test_the_loader_tells_the_rows_of_the_batches_that_come_next() -> None:
    """Of 150 examples a rank has 75: batches of 4 go over the end of its epoch."""
    kwargs = {"sources": [DataSource("sharegpt", str(ASSETS / "tiny_chat"))], "seq_len": 256}
    kwargs |= {"shuffle_seed": 5, "dp_world_size": 2, "dp_rank": 1}
    loader = build(**kwargs)
    stream = iter(loader)
    for _ in range(16):
        next(stream)
    state = loader.state_dict()
    told = loader.upcoming(6)
    assert loader.state_dict() == state
    assert told == [next(stream)[0].rows.tolist() for _ in range(6)]
    resumed = build(**kwargs)
    resumed.load_state_dict(state)
    again = iter(resumed)
    assert next(again)[0].rows.tolist() == told[0]
    assert resumed.upcoming(5) == told[1:]


def test_a_loader_tells_no_more_than_it_knows(tmp_path: Path) -> None:
    for kwargs in ({"loading": {"num_workers": 2}}, {"packing": True}):
        loader = build(**kwargs)
        next(iter(loader))
        assert loader.upcoming(3) == []
    path = write_examples(tmp_path / "a.jsonl", ["x"] * 11)
    loader = build(sources=[DataSource("alpaca", path)], infinite=False)
    next(iter(loader))
    assert loader.upcoming(3) == [[4, 5, 6, 7]]  # the last 3 fill no batch


def test_workers_do_not_repeat_examples() -> None:
    path = str(ASSETS / "tiny_chat")
    kwargs = {"sources": [DataSource("sharegpt", path)], "infinite": False, "batch_size": 5}
    single = torch.cat([inputs["input"] for inputs, _ in build(**kwargs)])
    double = torch.cat(
        [inputs["input"] for inputs, _ in build(loading={"num_workers": 2}, **kwargs)]
    )
    assert len(single) == len(double) == 150
    assert sorted(single.tolist()) == sorted(double.tolist())


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0), (1, 1)])
def test_one_worker_reads_what_the_process_itself_reads(
    before: int, after: int, packing: bool
) -> None:
    """To the last bit, also where one goes on for the other in the middle of a window.

    Templates are rendered in a process beside the worker.
    """
    source = DataSource("sharegpt", str(ASSETS / "tiny_chat"))
    tokenizer = FolderTokenizer(str(ASSETS / "tokenizer"))
    kwargs = {"sources": [source], "seq_len": 256, "shuffle_seed": 5, "packing": packing}
    kwargs |= {"dp_world_size": 2, "dp_rank": 1, "batch_size": 3}
    kwargs["template"] = build_chat_template("alpaca", tokenizer, str(ASSETS / "tokenizer"))
    whole = [batch for batch, _ in zip(build(**kwargs), range(12), strict=False)]
    loader = build(loading={"num_workers": before}, **kwargs)
    stream = iter(loader)
    found = [next(stream) for _ in range(5)]
    resumed = build(loading={"num_workers": after}, **kwargs)
    resumed.load_state_dict(loader.state_dict() | {"dp_rank_0": b""})
    stream = iter(resumed)
    found += [next(stream) for _ in range(7)]
    for (inputs, labels), (expected, targets) in zip(found, whole, strict=True):
        assert inputs.keys() == expected.keys()
        assert all(torch.equal(inputs[name], expected[name]) for name in inputs)
        assert torch.equal(labels, targets)


def write_examples(path: Path, outputs: list[Any]) -> str:
    examples = [{"instruction": "Say it.", "input": "", "output": output} for output in outputs]
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return str(path)


def test_local_examples_are_checked_before_the_first_step(tmp_path: Path) -> None:
    path = write_examples(tmp_path / "a.jsonl", ["x", "y", None])
    text = f"{path}, line 3: field 'output' is null; expected a string"
    with pytest.raises(DataExampleError) as info:
        build(sources=[DataSource("alpaca", path)])
    assert str(info.value) == text


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "name", "good"),
    [
        ("alpaca", "vicgalle/alpaca-gpt4", {"instruction": "x", "input": "", "output": "y"}),
        (
            "sharegpt",
            "teknium/OpenHermes-2.5",
            {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
        ),
    ],
)
def test_without_a_path_the_default_comes_from_the_hub(
    dataset: str, name: str, good: dict[str, Any], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = dict.fromkeys(good)
    asked = []

    def load_dataset(path: str, split: str) -> datasets.Dataset:
        asked.append((path, split))
        return datasets.Dataset.from_list([good, good, bad])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    sources = training_sources(make_job_config(training__dataset=dataset))
    loader = build(sources=sources, batch_size=1, loading={"num_workers": workers})
    assert asked == [(name, "train")]
    stream = iter(loader)
    next(stream)
    next(stream)
    with pytest.raises(DataExampleError, match=rf"^{name}, example 2: field '\w+' is null") as info:
        next(stream)
    assert len(str(info.value).splitlines()) == 1


def test_unknown_paths() -> None:
    source = DataSource("alpaca", "./nothing", key="validation.dataset_path")
    with pytest.raises(FileNotFoundError, match=r"^validation\.dataset_path is '\./nothing'"):
        build(sources=[source], section="validation")


def test_another_template_after_a_resume_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # whatever a test before has set
    tokenizer = FolderTokenizer(str(ASSETS / "tokenizer"))
    alpaca = build_chat_template("auto", tokenizer, str(ASSETS / "tokenizer"))
    loader = build()
    next(iter(loader))
    state = loader.state_dict()
    build().load_state_dict(state)
    assert not caplog.records
    build(template=alpaca).load_state_dict(state)
    (record,) = caplog.records
    assert "by the chat template 'alpaca'; before the checkpoint: 'plain' (data.c" in record.message
    caplog.clear()
    # A former version, which did not save the name: its default was the plain format.
    own = pickle.loads(state["dp_rank_0"])
    del own["_snapshot" if "_snapshot" in own else "dataset_state"]["template"]
    former = {**state, "dp_rank_0": pickle.dumps(own)}
    build().load_state_dict(former)
    assert not caplog.records
    build(template=alpaca).load_state_dict(former)
    (record,) = caplog.records
    assert "before the checkpoint: does not say, by default 'plain'" in record.message


def rows(batch: Any) -> list[int]:
    return batch[0].rows.tolist()


def rest(state: dict[str, Any], **kwargs: Any) -> list[list[int]]:
    """The next three batches of a loader that goes on from ``state``."""
    loader = build(**kwargs)
    loader.load_state_dict(state)
    batches = iter(loader)
    return [rows(next(batches)) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_looked_at_is_not_lost_and_comes_once(workers: int) -> None:
    plain = iter(build(loading={"num_workers": workers}, shuffle_seed=3))
    expected = [rows(next(plain)) for _ in range(6)]
    lookahead = Lookahead(build(loading={"num_workers": workers}, shuffle_seed=3))
    batches = iter(lookahead)
    seen = [rows(next(batches))]
    for _ in range(2):
        looked_at = lookahead.peek()
        assert lookahead.peek() is looked_at
        # A checkpoint that is saved now does not count it.
        state = lookahead.state_dict()
        resumed = rest(state, loading={"num_workers": workers}, shuffle_seed=3)
        assert resumed == expected[len(seen) : len(seen) + 3]
        batch = next(batches)
        assert batch is looked_at
        seen.append(rows(batch))
        assert (
            rest(lookahead.state_dict(), loading={"num_workers": workers}, shuffle_seed=3)[0]
            == (expected[len(seen)])
        )
    assert seen == expected[:3]


def test_at_the_end_there_is_nothing_to_look_at() -> None:
    some = {"infinite": False, "split": ExampleSplit(0.1, held_out=True)}
    n_batches = len(list(build(**some)))
    assert n_batches > 2
    lookahead = Lookahead(build(**some))
    batches = iter(lookahead)
    for _ in range(n_batches):
        assert lookahead.peek() is not None
        next(batches)
    assert lookahead.peek() is None
    with pytest.raises(StopIteration):
        next(batches)


def test_it_loads_what_the_loader_saves() -> None:
    loader = build(shuffle_seed=3)
    batches = iter(loader)
    next(batches)
    lookahead = Lookahead(build(shuffle_seed=3))
    keys = loader.state_dict().keys()
    assert lookahead.state_to_load(keys).keys() == loader.state_to_load(keys).keys()
    lookahead.load_state_dict(loader.state_dict())
    found, expected = next(iter(lookahead)), next(batches)
    assert torch.equal(found[0]["input"], expected[0]["input"])
