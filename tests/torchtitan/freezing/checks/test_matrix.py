"""What works with what: each feature is tried with each thing that could break it.

``GRID`` is the matrix once more, written by hand, so that a pair which is refused too much is found
as well as one that is not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torchtitan.helpers.job_configs import config, errors
from timelyfreeze.cli.torchrun import NEXT
from torchtitan.freezing.checks import check, features
from torchtitan.freezing.checks import requirements as needs
from torchtitan.freezing.checks.features import DEVICE, FEATURES, MEMORY, PROFILE
from torchtitan.freezing.checks.requirements import Feature, feature_errors
from torchtitan.settings import JobConfig

ROOT = Path(__file__).resolve().parents[4]
ALL = (*FEATURES, DEVICE, PROFILE, MEMORY)
FLOAT8, GROUPED = "quantize.linear.float8", "quantize.grouped_mm.float8"
PP = "parallelism.pipeline_parallel_"
NONE = {"freezing.method": "none"}
PLAN = {"freezing.method": "timelyfreeze"}
SAVES = {"checkpoint.enable": True}
PICTURES = {"model.name": "vit", "training.dataset": "images", "training.dataset_path": "pictures",
            f"{PP}microbatch_size": 2}  # fmt: skip
ELASTIC = {"freezing.elastic.enable": True}

# fmt: off
# How each feature is switched on, by a key and others, in a run of policy "fixed".
ON: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "emulation": ("emulation.enable", True, {}),
    "overlap": (f"{PP}expert_parallel_overlap", True, {f"{PP}schedule": "DualPipeV", **NONE}),
    "split": (f"{PP}schedule", "InterleavedZeroBubble", {}),
    "contexts": ("parallelism.context_parallel_degree", 2, {}),
    "tensors": ("parallelism.tensor_parallel_degree", 2, {}),
    "float8": (f'model.converters has "{FLOAT8}"', None, {"model.converters": [FLOAT8]}),
    "emulated float8": (f"{FLOAT8}.emulate", True, {"model.converters": [FLOAT8], "gpu": False}),
    "grouped": (f'model.converters has "{GROUPED}"', None,
                {"model.converters": [GROUPED], f"{PP}degree": 1, **NONE}),
    "vit": ("model.name", "vit", PICTURES),
    "images": ("training.dataset", "images", PICTURES),
    "packed": ("data.packing", True, {}),
    "paths": ("data.paths", ["a", "b"], {}),
    "weights": ("data.weights", [1.0], {}),
    "subset": ("data.subset", "en", {}),
    "data split": ("data.split", "test", {}),
    "revision": ("data.revision", "v1", {}),
    "template": ("data.chat_template", "chatml", {}),
    "held out": ("data.validation_fraction", 0.1, {}),
    "fixed": ("freezing.method", "fixed", {}),
    "apf": ("freezing.method", "apf", {}),
    "planned apf": ("freezing.method", "timelyfreeze+apf", {}),
    "compiled": ('compile.components has "model"', None, {"compile.enable": True, **PLAN}),
    "egeria": ("freezing.method", "egeria", {}),
    "planned egeria": ("freezing.method", "timelyfreeze+egeria", {}),
    "egeria of pictures": ("freezing.method", "egeria", PICTURES),
    "epochs": ("checks_per_epoch of the policy is set", None,
               {"freezing.method": "autofreeze", "freezing.autofreeze.checks_per_epoch": 5}),
    "rank": ("freezing.gradient_rank", 8, PLAN),
    "lora": ("freezing.method", "lora", {}),
    "adapters first": ("lora.until", 48, {}),
    "saved": ("checkpoint.last_save_in_hf", True, SAVES),
    "cache": ("freezing.cache.enable", True, {}),
    "elastic": ("freezing.elastic.enable", True, {}),
    "by time": ("freezing.elastic.partition", "time", ELASTIC),
    "search": ("freezing.elastic.search_microbatches", True, ELASTIC),
    "sublayers": ("freezing.elastic.sublayers", True, ELASTIC),
    "half": ("parallelism.module_fqns_per_model_part", [["layers.0/attention"]],
             {"freezing.elastic.sublayers": True, **ELASTIC}),
    "performance": ("freezing.packing.mode", "performance", {}),
    "efficiency": ("freezing.packing.mode", "efficiency", SAVES),
    "ahead": ("freezing.run_ahead", True, {}),
    "early step": ("optimizer.early_step_in_backward", True, {f"{PP}degree": 1, **NONE}),
    "loaded": ("checkpoint.initial_load_in_hf", True, SAVES),
    "profiler": ("profiling.enable_profiling", True, {}),
    "experts": ("model.flavor", "debugmodel",
                {"model.name": "deepseek_v3", "freezing.method": "none", f"{PP}degree": 1}),
    "profile": ("stages are profiled", None, {}),
    "estimate": ("memory is estimated", None, {}),
}
ONE, FALSE, TRUE = "it must be 1", "it must be false", "it must be true"
OFF = "switch one of them off"
LORA = "install the extra: pip install 'timelyfreeze[lora]'"
VISION = "install the extra: pip install 'timelyfreeze[vision]'"
EXAMPLES = "it must be one of auto, messages, sharegpt, prompt_completion, alpaca"
# What may break a feature, by a key or a thing of the machine, and what is asked for then.
BREAKS: dict[str, tuple[str, Any, str]] = {
    "one rank": (f"{PP}degree", 1, "it must be the number of ranks, 2 or more"),
    "ranks": (f"{PP}degree", 4, ONE),
    "replicate": ("parallelism.data_parallel_replicate_degree", 2, ONE),
    "shard": ("parallelism.data_parallel_shard_degree", 2, "it must be 1 or -1"),
    "context": ("parallelism.context_parallel_degree", 2, ONE),
    "tensor": ("parallelism.tensor_parallel_degree", 2, ONE),
    "expert": ("parallelism.expert_parallel_degree", 2, ONE),
    "expert tensor": ("parallelism.expert_tensor_parallel_degree", 2, ONE),
    "replicas": ("parallelism.data_parallel_shard_degree is -1", {"WORLD_SIZE": "8"},
                 f"start as many processes as {PP}degree, or the others are replicas"),
    "processes": ("several processes were started", {"WORLD_SIZE": "4"}, "start it with NGPU=1"),
    "nodes": ("the run has several nodes",
              {"TORCHELASTIC_RUN_ID": "1", "GROUP_WORLD_SIZE": "2", NEXT: "next.json"},
              "start it on one"),
    "torchrun": ("the run was started by torchrun alone", {"TORCHELASTIC_RUN_ID": "1"},
                 "start it by `timelyfreeze train` or run_train.sh"),
    "fake": ("comm.mode", "fake_backend", "it must be 'default'"),
    "stages": (f"{PP}schedule", "Interleaved1F1B", "it must be 'GPipe' or '1F1B'"),
    "csv": (f"{PP}schedule_csv", "own.csv", "it must be '' or unset"),
    "reshard": ("parallelism.fsdp_reshard_after_forward", "always",
                "it must be 'default' or 'never'"),
    "compile": ('compile.components has "model"', {"compile.enable": True},
                'set compile.enable = false or components = ["loss"]'),
    "full": ("activation_checkpoint.mode", "full", "it must be 'none'"),
    "selective": ("activation_checkpoint.mode", "selective", "it must be 'none' or 'full'"),
    "emulated": ("emulation.enable", True, FALSE),
    "policy": ("freezing.method", "fixed",
               'it must be "timelyfreeze", alone or with a policy, which makes a plan'),
    "freezing": ("freezing.method", "fixed", "it must be 'none' or 'lora'"),
    "planned": ("freezing.method", "timelyfreeze+apf", "it must be a policy without a plan"),
    "alone": ("freezing.method", "timelyfreeze", "it must be a policy, or 'timelyfreeze+' and one"),
    "compares": ("freezing.method", "egeria", "it must be a policy of whole blocks"),
    "adapters": ("freezing.method", "lora", "it must be another"),
    "ratios": ("freezing.max_freeze_ratio is [0.8, 0.7]",
               {"freezing.max_freeze_ratio": [0.8, 0.7], "freezing.method": "timelyfreeze+apf"},
               "it must be one value"),
    "input": ("freezing.skip_input_grads", "off", "it must be 'use'"),
    "first": ("freezing.first_stage", "per_tensor", "it must be 'all_or_nothing'"),
    "discard": ("freezing.discard_batches", 0, "it must be 1 or more"),
    "cached": ("freezing.cache.enable", True, OFF),
    "moves": ("freezing.elastic.enable", True, OFF),
    "timed": ("freezing.elastic.partition", "time", "it must be 'parameters'"),
    "whole": ("freezing.elastic.sublayers", False, TRUE),
    "packs": ("freezing.packing.mode", "performance", OFF),
    "runs ahead": ("freezing.run_ahead", True, FALSE),
    "hf files": ("checkpoint.last_save_in_hf", True, FALSE),
    "text": ("training.dataset", "c4", EXAMPLES),
    "no rows": ("training.dataset", "c4", f"{EXAMPLES}, images"),
    "no pictures": ("training.dataset", "alpaca", "it must be 'images'"),
    "other validation": ("validation.dataset is 'alpaca'",
                         {"validation.enable": True, "validation.dataset": "alpaca"},
                         "it must be 'images' too"),
    "nowhere": ("training.dataset_path", None,
                "it must name a folder, parquet files or a data set on the hub"),
    "packing": ("data.packing", True, FALSE),
    "augmented": ("vision.augmentation is 'resized_crop'", PICTURES, "it must be 'none'"),
    "mixed": ("vision.mixup", 0.5, "it must be 0"),
    "qwen3": ("model.name", "qwen3", "it must be 'llama3'"),
    "no halves": ("model.name", "qwen3", "it must be 'llama3' or 'vit'"),
    "unknown": ("model.name", "qwen3", "it must be 'llama3' or 'vit' or 'convnextv2'"),
    "reads text": ("model.name", "llama3", "it must be 'vit' or 'convnextv2'"),
    "vocabulary": ("model.vocab_size", 7, "it must be unset"),
    "rope": ("model.rope_scaling_factor", 8.0, "it must be unset"),
    "rope low": ("model.rope_low_freq_factor", 1.0, "it must be unset"),
    "rope high": ("model.rope_high_freq_factor", 4.0, "it must be unset"),
    "rope length": ("model.rope_original_max_position_embeddings", 8192, "it must be unset"),
    "one picture": (f"{PP}microbatch_size makes microbatches of one picture",
                    {f"{PP}microbatch_size": 1}, "it must be 2 or more"),
    "converters": ("model.converters", [FLOAT8], "it must be []"),
    "early": ("optimizer.early_step_in_backward", True, FALSE),
    "not saved": ("checkpoint.enable", False, TRUE),
    "load only": ("checkpoint.load_only", True, FALSE),
    "load step": ("checkpoint.load_step", 4, "it must be -1"),
    "excluded": ("checkpoint.exclude_from_loading", ["freezing"], "it must be []"),
    "saves all": ("checkpoint.last_save_model_only", False, TRUE),
    "offload": ("training.enable_cpu_offload", True, FALSE),
    "flex": ("model.flavor", "debugmodel_flex_attn",
             "it must be one with the attn_type 'sdpa', whose blocks make their masks themselves"),
    "cpu": ("this machine has no accelerator", {"accelerator": False}, "do without it on a CPU"),
    "small gpu": ("no GPU of compute capability 8.9 or more is here", {"gpu": False},
                  "set quantize.linear.float8.emulate = true, to try it slowly"),
    **{module: (f"the package {name} is not installed", {"without": module}, install)
       for module, name, install in (
           ("peft", "peft", LORA), ("torchao", "torchao", "install it"),
           ("PIL", "pillow", VISION), ("torchvision", "torchvision", VISION))},
}
_LAYERS = "context, tensor"
_ALONE = f"replicate, shard, {_LAYERS}, expert, expert tensor"
_EXAMPLES = dict.fromkeys(
    ("paths", "weights", "subset", "data split", "revision", "template"), "text")
GRID: dict[str, str] = {
    "emulation": f"{_ALONE}, one rank, processes, fake",
    "overlap": "cpu, freezing, emulated",
    "split": "reshard, compile, full",
    "contexts": "cpu",
    "tensors": "compile",
    "float8": "torchao, small gpu",
    "emulated float8": "compile",
    "grouped": "torchao, ranks",
    "vit": f"{_LAYERS}, no pictures, vocabulary, rope, rope low, rope high, rope length, compile",
    "images": "reads text, PIL, torchvision, nowhere, other validation",
    "packed": f"text, {_LAYERS}",
    **_EXAMPLES,
    "held out": "no rows",
    "fixed": "one rank",
    "apf": "one rank, compile",
    "planned apf": "one rank, compile",
    "compiled": "discard",
    "egeria": f"one rank, {_LAYERS}, flex",
    "planned egeria": f"one rank, {_LAYERS}, flex",
    "egeria of pictures": f"one rank, {_LAYERS}, one picture",
    "epochs": "no rows, packing",
    "rank": f"{_LAYERS}, converters",
    "lora": "peft, qwen3, tensor, converters, early",
    "adapters first": "peft, qwen3, tensor, converters, early, cached, moves, packs, runs ahead, "
                      "hf files",
    "saved": "adapters, saves all",
    "cache": f"planned, no rows, unknown, packing, augmented, mixed, {_LAYERS}",
    "elastic": f"alone, ratios, stages, csv, {_LAYERS}, expert, no rows, unknown",
    "by time": "first, input, compile",
    "search": "emulated, planned",
    "sublayers": "compares, no halves, compile, timed",
    "half": "whole",
    "performance": f"planned, first, input, compile, stages, csv, moves, cached, emulated, "
                   f"{_ALONE}, replicas, unknown, selective, no rows",
    "ahead": f"planned, no rows, unknown, emulated, stages, csv, {_ALONE}, replicas, cached, "
             "moves, packs",
    "early step": "ranks",
    "loaded": "not saved",
    "profiler": "cpu",
    "experts": "cpu",
    "profile": f"{_ALONE}, one rank, compile, adapters, packing, offload",
    "estimate": f"{_ALONE}, unknown, selective",
}
GRID["efficiency"] = (
    f"{GRID['performance']}, not saved, load only, load step, excluded, nodes, torchrun")
# fmt: on


def put(holder: Any, key: str, value: Any) -> Any:
    """Return the holder with a value under a key of sections; settings do not change once made."""
    name, _, rest = key.partition(".")
    value = put(getattr(holder, name), rest, value) if rest else value
    try:
        setattr(holder, name, value)
    except AttributeError:
        return replace(holder, **{name: value})
    return holder


class Machine:
    """A host that has what a run may want, and lacks what a test takes away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def run(self, *changes: dict[str, Any]) -> JobConfig:
        """Return a run on a machine that has everything, but for the changes."""
        keys = {"accelerator": True, "gpu": True, "without": "", "freezing.method": "fixed"}
        keys |= {"training.dataset": "alpaca", "model.flavor": "debugmodel"}
        keys |= dict.fromkeys(("WORLD_SIZE", "TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE", NEXT))
        for change in changes:
            keys |= change
        gpu, accelerator, package = (keys.pop(name) for name in ("gpu", "accelerator", "without"))
        patch = self._monkeypatch.setattr
        patch(torch.accelerator, "is_available", lambda: accelerator)
        for module in (features, needs):
            patch(module, "has_cuda_capability", lambda major, minor: gpu)
        patch(needs, "find_spec", lambda module: module != package)
        job_config = config()
        for key, value in keys.items():
            if "." in key:
                put(job_config, key, value)
            elif value is None:
                self._monkeypatch.delenv(key, raising=False)
            else:
                self._monkeypatch.setenv(key, value)
        return job_config


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def told(key: str, value: Any) -> str:
    if " " in key:
        return key
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{key} is {'unset' if value is None else shown}"


def asked(key: str, value: Any) -> dict[str, Any]:
    return value or {} if " " in key else {key: value}


def features_of(name: str) -> tuple[Feature, ...]:
    """Return the features of a run, or what a command or a run that trains needs."""
    apart = {"profile": (PROFILE,), "estimate": (MEMORY,), "experts": (DEVICE,)}
    return apart.get(name, FEATURES)


@pytest.mark.parametrize("name", ON)
def test_a_feature_is_refused_with_what_it_cannot_be_with(name: str, machine: Machine) -> None:
    key, value, others = ON[name]
    on, switches = told(key, value), {**others, **asked(key, value)}
    assert list(feature_errors(machine.run(switches), features_of(name))) == []
    found = set()
    for each, (what, value, rule) in BREAKS.items():
        run = machine.run(switches, asked(what, value))
        lines = feature_errors(run, features_of(name))
        start, end = f"{on}, and {told(what, value)}; ", f", so {rule}"
        found |= {each for line in lines if line.startswith(start) and line.endswith(end)}
    assert found == set(GRID[name].split(", "))


def test_every_need_of_every_feature_is_tried(machine: Machine) -> None:
    tried = set()
    for name, row in GRID.items():
        key, value, others = ON[name]
        for each in row.split(", "):
            what, broken, _ = BREAKS[each]
            run = machine.run(others, asked(key, value), asked(what, broken))
            tried |= {
                (feature, need)
                for feature in features_of(name)
                if feature.is_on(run)
                for need in feature.needs
                if not need.is_met(run)
            }
    assert tried == {(feature, need) for feature in ALL for need in feature.needs}


@pytest.mark.parametrize("name", ["cache", "elastic", "performance", "ahead", "rank"])
def test_a_run_that_freezes_nothing_does_not_look_at_its_front(name: str, machine: Machine) -> None:
    key, value, others = ON[name]
    text = {"training.dataset": "c4", "freezing.method": "none"}
    check(machine.run(others, {key: value}, text))


def test_they_are_among_the_checks_of_a_run(machine: Machine) -> None:
    job_config = machine.run({"freezing.run_ahead": True, "emulation.enable": True})
    (line,) = errors(job_config)
    assert line == (
        "freezing.run_ahead is true, and emulation.enable is true; ranks that hold the frozen "
        "front alone work for the next batch, which has to be known, so it must be false"
    )
