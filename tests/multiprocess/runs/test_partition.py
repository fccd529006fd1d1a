"""Runs whose model is cut by ``parallelism.partition``: trained, resumed and emulated."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from launcher import ROOT, arguments, merged, run_scenarios
from methods import PHASES, STEPS
from saving import SAVED, resumed_from

from timelyfreeze.whatif.bounds_file import read_bounds_file

STOP = 8


def scenario(folder, name, *, partition="parameters", save_at=(), **settings):
    """A run on two ranks with two stages each, of a configuration that says nothing of cuts."""
    text = (ROOT / "train_configs" / "tiny_8m.toml").read_text()
    toml = folder / "uncut.toml"
    toml.write_text(re.sub(r"(?m)^pipeline_parallel_\w+_less_layers.*\n", "", text))
    given = arguments(
        model__flavor="tiny",
        parallelism__pipeline_parallel_degree=2,
        parallelism__pipeline_parallel_schedule="Interleaved1F1B",
        parallelism__pipeline_parallel_microbatch_size=2,
        parallelism__partition=partition,
        training__steps=STEPS,
        freezing__method="timelyfreeze",
        **PHASES,
        **settings,
    )
    words = [word for word in given if "less_layers" not in word and "config_file" not in word]
    return {
        "name": name,
        "fake_clock": True,
        "save_at": list(save_at),
        "args": [f"--job.config_file={toml}", *words],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("partition")


@pytest.fixture(scope="module")
def runs(folder):
    saved = folder / "whole" / "checkpoint" / f"step-{STOP}"
    resumed = resumed_from(saved)
    real = [
        scenario(folder, "default", partition=""),
        scenario(folder, "whole", save_at=[STOP], **SAVED),
        {**scenario(folder, "resumed", **SAVED, **resumed), "fixed_weights": False},
    ]
    seen = run_scenarios(folder, 2, real)
    emulated = [scenario(folder, "emulated", emulation__enable=None)]
    return seen | run_scenarios(folder / "one", 1, emulated)


def layers_and_sizes(ranks):
    """Layers and parameters of each stage, front to back."""
    names, sizes = merged(ranks, "names"), merged(ranks, "sizes")
    layers = [
        len({name.split(".")[1] for name in names[stage] if name.startswith("layers.")})
        for stage in sorted(names)
    ]
    return layers, [sum(sizes[stage]) for stage in sorted(sizes)]


def test_no_other_cut_has_a_smaller_rank(runs):
    layers, sizes = layers_and_sizes(runs["whole"])
    default_layers, _ = layers_and_sizes(runs["default"])
    assert sum(layers) == sum(default_layers) == 8
    assert layers != default_layers
    layer = sizes[1] // layers[1]  # a stage in the middle has nothing else
    ends = [size - n * layer for size, n in zip(sizes, layers, strict=True)]

    def fullest(split):
        each = [end + n * layer for end, n in zip(ends, split, strict=True)]
        return max(each[0] + each[2], each[1] + each[3])

    splits = itertools.product(range(9), repeat=4)
    others = [s for s in splits if sum(s) == 8 and s[1] and s[2]]
    assert fullest(layers) == min(map(fullest, others))


def test_the_cut_changes_no_loss_before_anything_is_frozen(runs):
    def losses(name):
        (found,) = [seen["losses"] for seen in runs[name] if seen["losses"][0] != -1.0]
        return found[:3]

    assert losses("whole") == pytest.approx(losses("default"), rel=1e-5)


def test_a_resumed_run_equals_the_undisturbed_one(runs):
    for whole, resumed in zip(runs["whole"], runs["resumed"], strict=True):
        assert resumed["losses"] == whole["losses"][STOP:]
        assert resumed["masks"] == [m for m in whole["masks"] if m[0] > STOP]
        assert resumed["plan"] == whole["plan"]
    left, right = merged(runs["resumed"], "weights"), merged(runs["whole"], "weights")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_an_emulation_is_cut_alike_and_computes_the_same(runs):
    assert layers_and_sizes(runs["emulated"]) == layers_and_sizes(runs["whole"])
    (emulated,) = runs["emulated"]
    weights = merged(runs["whole"], "weights")
    assert all(torch.equal(emulated["weights"][name], weights[name]) for name in weights)


def test_the_run_tells_its_cut_and_notes_sizes(runs, folder: Path):
    layers, sizes = layers_and_sizes(runs["whole"])
    split = ",".join(map(str, layers))
    assert (
        f"parallelism.partition = 'parameters': layers {split}; "
        in (folder / "log.txt").read_text()
    )
    (path,) = (folder / "whole").rglob("bounds.json")
    notes = read_bounds_file(path).metadata
    assert list(notes.layers) == layers
    parts = notes.parameters
    assert sizes[0] == parts.first + sum(parts.layers[: layers[0]])
    assert sizes[-1] == parts.last + sum(parts.layers[-layers[-1] :])
    assert notes.memory.layer.weights == 4 * parts.layers[0]
