"""Links as keys, their runs in turns, and as many rows in a step of each."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from timelyfreeze.compare.runs import links as module
from timelyfreeze.compare.runs.jobs import ROOT, Settings
from timelyfreeze.compare.runs.links import (
    LINKS,
    Packed,
    batch_of_rows,
    chain_jobs,
    fastest,
    read_links,
    read_packed,
)
from timelyfreeze.whatif.bounds_file import read_bounds_file
from torchtitan.data.sequences import sequence_text

PACKED = Packed(rows=2.48, targets=376.0)
METHOD, SCHEDULE = "freezing.method", "parallelism.pipeline_parallel_schedule"
BATCH = "training.local_batch_size"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    path = tmp_path / "small.toml"
    path.write_text("[training]\nlocal_batch_size = 8\n[freezing]\nlast_ramp_step = 16\n")
    return Settings(path)


def jobs_of(settings: Settings, *names: str, seeds=(42,), **limits):
    return chain_jobs(read_links(names or LINKS), seeds, settings, 1, PACKED, **limits)


def fixed(job) -> dict:
    """Return the keys of a link's run that no times decide."""
    return job.fit.keywords["fixed"]


def test_the_first_link_is_what_torchtitan_does() -> None:
    plain = read_links(LINKS)["plain"]
    assert plain.over == ""
    assert plain.keys == {
        METHOD: "none",
        "data.packing": False,
        "data.all_logits": True,
        SCHEDULE: "1F1B",
        "parallelism.partition": "",
        "parallelism.pipeline_parallel_first_stage_less_layers": 1,
        "parallelism.pipeline_parallel_last_stage_less_layers": 1,
    }


def test_a_link_sets_its_keys_over_those_of_another() -> None:
    links = read_links(LINKS)
    own = {
        name: {
            key: value for key, value in link.keys.items() if links[link.over].keys[key] != value
        }
        for name, link in links.items()
        if link.over
    }
    assert [(name, links[name].over, keys) for name, keys in own.items()] == [
        ("packed", "plain", {"data.packing": True}),
        ("learned", "packed", {"data.all_logits": False}),
        ("split", "learned", {}),
        ("schedule", "split", {}),
        ("freezing", "schedule", {METHOD: "timelyfreeze"}),
        ("lora", "schedule", {METHOD: "lora"}),
    ]
    assert links["lora"].keys == {
        **links["plain"].keys, "data.packing": True, "data.all_logits": False, METHOD: "lora",
    }  # fmt: skip
    assert [bool(link.schedules) for link in links.values()] == 3 * [False] + 4 * [True]
    assert list(links["split"].schedules) == ["1F1B"]
    assert links["lora"].schedules == links["schedule"].schedules


def test_a_link_left_out_leaves_its_keys_to_the_next_one() -> None:
    links = read_links(["learned", "lora", "plain"])
    assert list(links) == ["plain", "learned", "lora"]
    assert (links["learned"].over, links["lora"].over) == ("plain", "learned")
    assert links["lora"].keys == read_links(LINKS)["lora"].keys


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["plain", "backed"], "--links has backed; links are plain, packed, learned"),
        (["freezing", "lora"], "--links has lora, and nothing that it is set against; add plain"),
    ],
)
def test_links_that_are_no_chain_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_links(names)


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        # 8 sequences of 2.48 rows: 19.84.
        ((), {BATCH: 20}),
        # A whole number of microbatches of 3, and as many batches in a step as before.
        (("--parallelism.pipeline_parallel_microbatch_size=3",), {BATCH: 21}),
        (
            (f"--{BATCH}=4", "--training.global_batch_size=12"),
            {BATCH: 10, "training.global_batch_size": 30},
        ),
    ],
)
def test_a_plain_step_has_as_many_rows(settings: Settings, arguments, keys) -> None:
    found = batch_of_rows(Settings(settings.config, arguments), PACKED)
    assert found == {**keys, "validation.local_batch_size": keys[BATCH]}


def test_every_second_turn_goes_backwards_behind_the_run_of_times(settings: Settings) -> None:
    jobs = jobs_of(settings, seeds=(42, 22))
    order = [str(job.path) for job in jobs]
    assert order[:2] == ["times", "plain/seed_42"]
    assert order[7:9] == ["lora/seed_42", "lora/seed_22"]
    assert order[1:8] == [name.replace("_22", "_42") for name in order[:7:-1]]
    assert [(job.keys[METHOD], fixed(job)) for job in jobs[:3]] == [
        ("timelyfreeze", {"training.steps": 17}),
        ("none", {BATCH: 20, "validation.local_batch_size": 20}),
        ("none", {}),
    ]
    assert jobs[1].keys["data.seed"] == 42
    assert "data.seed" not in jobs[0].keys
    assert jobs[0].keys == {**read_links(LINKS)["split"].keys, METHOD: "timelyfreeze"}
    chooses = [job.fit.keywords["link"] is not None for job in jobs[:8]]
    assert chooses == [False, False, False, False, True, True, True, True]
    # TorchTitan's cut beside a partition would be refused.
    less = [any(key.endswith("less_layers") for key in job.keys) for job in jobs[:8]]
    assert less == [not one for one in chooses]


def test_without_chosen_splits_no_times_are_measured(settings: Settings) -> None:
    jobs = jobs_of(settings, "plain", "packed")
    assert [str(job.path) for job in jobs] == ["plain/seed_42", "packed/seed_42"]


def test_short_runs_are_those_that_freeze_nothing_as_they_go(settings: Settings) -> None:
    steps = [fixed(job).get("training.steps") for job in jobs_of(settings, n_steps=4)]
    assert steps == [17, 4, 4, 4, 4, 4, None, 4]


# --- rows of a packed sequence --------------------------------------------------------------------


def test_rows_are_counted_in_what_samples_prints(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two rows, of 3 and 4 tokens, and of one of 6; 2, 3 and 5 of them learned."""
    texts = []
    for n_tokens, positions, learned in ((7, [0, 1, 2, 0, 1, 2, 3], 5), (6, [*range(6)], 5)):
        labels = torch.full((8,), -100)
        labels[:learned] = 1
        inputs = {"input": torch.zeros(8, dtype=torch.int64), "n_tokens": torch.tensor(n_tokens)}
        inputs["positions"] = torch.tensor([*positions, *range(8 - n_tokens)])
        texts.append(sequence_text(inputs, labels, lambda ids: "-- sequence 9: 9 examples"))
    said = "".join(f"-- sequence {i}: {text}\n\n" for i, text in enumerate(texts, 1))
    asked = []

    def run(command, **_):
        asked.append(command)
        return SimpleNamespace(stdout=said, stderr="", returncode=0)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # or nvidia-smi would be asked
    monkeypatch.setattr(subprocess, "run", run)
    assert read_packed(Settings(settings.config, ("--a.b=1",))) == Packed(rows=1.5, targets=5.0)
    assert asked[0][3:] == ["samples", str(settings.config), "--samples=200", "--a.b=1",
                            "--data.packing"]  # fmt: skip


def test_rows_that_cannot_be_packed_are_refused(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = SimpleNamespace(stdout="", stderr="warning\nerror: no such rows\n", returncode=2)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ValueError, match="those of CONFIG cannot be: no such rows"):
        read_packed(settings)


# --- what measured times choose -------------------------------------------------------------------

PROFILE = ROOT / "profiles/tiny_8m_1F1B/bounds.json"
CANDIDATES = (("1F1B", "ZBVZeroBubble"), ("time", "parameters"))


def test_the_fastest_of_all_that_fit_the_memory_is_taken() -> None:
    """With nothing else fitting, the one case that does; with room for all, the shortest step."""
    file = read_bounds_file(PROFILE)
    alone = {
        (schedule, split): fastest(file, (schedule,), (split,), None)
        for schedule in CANDIDATES[0] for split in CANDIDATES[1]
    }  # fmt: skip
    best = fastest(file, *CANDIDATES, None)
    assert best.step_ms == min(case.step_ms for case in alone.values())
    assert len({case.step_ms for case in alone.values()}) > 1
    sizes = {key: module._gib(file, case, 4) for key, case in alone.items()}
    least = min(sizes.values())
    small = fastest(file, *CANDIDATES, least)
    assert sizes[small.schedule, small.split] == least
    with pytest.raises(ValueError, match="none of 1F1B, ZBVZeroBubble fits into --memory-gib"):
        fastest(file, *CANDIDATES, 0.9 * least)


def test_split_and_schedule_come_from_the_run_of_times(settings: Settings, tmp_path: Path) -> None:
    job = jobs_of(settings)[4]
    with pytest.raises(ValueError, match="times has no finished run"):
        job.fitted(tmp_path / "out")
