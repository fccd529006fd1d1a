"""The runs behind the paper's tables and figures, as comparisons that ``compare run`` makes.

The paper does not say which model its Figures 4, 13, 14 and 15 show, nor what Figure 13 ran on;
here it is its smallest, and A6000s.
"""

from __future__ import annotations

import csv
import functools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from timelyfreeze.compare.runs.jobs import ROOT

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
METHODS = (
    "none", "apf", "autofreeze", "timelyfreeze", "timelyfreeze+apf", "timelyfreeze+autofreeze",
)  # fmt: skip
CONFIGS = ROOT / "train_configs"
_SMALL = "paper_small"
# Configurations of image classifiers, and the small ones that stand for them.
_SMALL_VISION = {
    "convnextv2_l_food101": "convnextv2_cifar10", "vit_l32_imagenet": "vit_cifar10"
}  # fmt: skip
# Flavors; the second stands for the smallest of the paper's models, so that pictures have two.
_SMALL_MODEL, _SMALLER = "8M", "debugmodel"
_FOLDERS = {
    "Llama-3.2-1B": "llama3_2_1b", "Llama-3-8B": "llama3_8b", "Llama-2-13B": "llama2_13b"
}  # fmt: skip


@dataclass(frozen=True)
class Study:
    """Runs that are made and shown together.

    Attributes:
        folder: Where they go, below the output; studies of one folder share their runs.
        model: As ``measured`` names it.
        config: File of all runs, in ``train_configs``, without ending.
        hardware: What the paper ran it on.
        schedules: Pipeline schedules.
        methods: Freezing methods.
        seeds: Seeds.
        n_ranks: Pipeline ranks.
        keys: Keys of the configuration that differ from the file.
        vary: A key and its values, ``key=a,b,c``, each of them a run of its own; or "".
        is_emulated: Whether one process stands for all ranks.
        profiled: Folder of another study, the bounds of whose runs say where the model is cut.
    """

    folder: str
    model: str
    config: str
    hardware: str
    seeds: tuple[int, ...]
    schedules: tuple[str, ...] = SCHEDULES
    methods: tuple[str, ...] = METHODS
    n_ranks: int = 4
    keys: Mapping[str, Any] = field(default_factory=dict)
    vary: str = ""
    is_emulated: bool = False
    profiled: str = ""

    @property
    def is_small(self) -> bool:
        """Whether a small model stands for the paper's."""
        return self.config in (_SMALL, *_SMALL_VISION.values())

    @property
    def max_freeze_ratio(self) -> float:
        """The cap of its runs."""
        return float(self.settings()["freezing"]["max_freeze_ratio"])

    @property
    def file(self) -> Path:
        """The configuration."""
        return CONFIGS / f"{self.config}.toml"

    @property
    def n_runs(self) -> int:
        """How many runs it has."""
        return len(self.schedules) * len(self.seeds) * sum(map(self._n_values, self.methods))

    def _n_values(self, method: str) -> int:
        """Return how many values of the varied key a method runs with."""
        return len(self.vary.split(",")) if self.vary and method != "none" else 1

    def settings(self) -> dict[str, Any]:
        """Return the sections of its configuration file."""
        return tomllib.loads(self.file.read_text())

    def hours(self) -> float:
        """Return how long its runs train, at the paper's own speed."""
        if self.config in _SMALL_VISION:
            trained = (
                measured()[self.model, schedule, method]["seconds"]
                for schedule in self.schedules
                for method in self.methods
            )
            return len(self.seeds) * math.fsum(trained) / 3600.0
        training = self.settings()["training"]
        batch = self.keys.get("training.global_batch_size", training["global_batch_size"])
        n_steps = self.keys.get("training.steps", training["steps"])
        n_tokens = n_steps * batch * training["seq_len"]
        seconds = math.fsum(
            self._n_values(method)
            * n_tokens
            / (self.n_ranks * _speed(self.model, schedule, method))
            for schedule in self.schedules
            for method in self.methods
        )
        return len(self.seeds) * seconds / 3600.0

    def command(self, output: Path, evaluate: str | None, arguments: Sequence[str]) -> list[str]:
        """Return the words behind ``timelyfreeze compare`` that make or resume the runs.

        Args:
            output: Folder of all studies.
            evaluate: Options of ``timelyfreeze evaluate`` for each run; None scores none.
            arguments: Further ones of the trainer.
        """
        keys = dict(self.keys)
        if self.is_emulated:
            keys |= {
                "emulation.enable": True,
                "parallelism.pipeline_parallel_degree": self.n_ranks,
            }
        if self.profiled and (found := sorted((output / self.profiled).rglob("bounds.json"))):
            keys["parallelism.partition_profile"] = str(found[0])
        words = (f"--{key}" if value is True else f"--{key}={value}" for key, value in keys.items())
        return [
            "run", str(self.file), str(output / self.folder),
            "--nproc", str(1 if self.is_emulated else self.n_ranks),
            "--schedules", *self.schedules,
            "--methods", *self.methods,
            "--seeds", *map(str, self.seeds),
            *([f"--vary={self.vary}"] if self.vary else []),
            *([] if evaluate is None else [f"--evaluate={evaluate}"]),
            "--", *words, *arguments,
        ]  # fmt: skip

    def small(self) -> Study:
        """Return the same for a small model, emulated by one process, with one seed.

        The paper's larger models have one that stands for both; its runs are made once.
        """
        if self.config in _SMALL_VISION:
            return replace(
                self,
                folder=f"small_{self.folder}",
                config=_SMALL_VISION[self.config],
                seeds=self.seeds[:1],
                keys={
                    **self.keys,
                    "freezing.preset": "paper",
                    "freezing.max_freeze_ratio": self.max_freeze_ratio,
                },
                is_emulated=True,
                profiled=f"small_{self.profiled}" if self.profiled else "",
            )
        kept = {k: v for k, v in self.keys.items() if k == "training.local_batch_size"}
        # With more ranks it would have fewer layers than stages.
        is_smaller = self.model == LLAMA_1B.model and self.n_ranks == LLAMA_1B.n_ranks
        name = _SMALLER if is_smaller else _SMALL_MODEL
        return replace(
            self,
            folder=f"small_{name}{self.folder.removeprefix(_FOLDERS[self.model])}",
            config=_SMALL,
            seeds=self.seeds[:1],
            keys={**kept, **({"model.flavor": name} if is_smaller else {})},
            is_emulated=True,
        )


def _speed(model: str, schedule: str, method: str) -> float:
    values = measured()[model, schedule, method]
    return values["device_tokens_per_second"]


def _main(model: str, config: str, hardware: str, *seeds: int) -> Study:
    return Study(_FOLDERS[model], model, config, hardware, seeds)


LLAMA_1B = _main("Llama-3.2-1B", "llama3_2_1b_alpaca_gpt4", "4 x A6000", 42, 22, 11)
LLAMA_8B = _main("Llama-3-8B", "llama3_8b_openhermes", "4 x H200", 42, 22, 11)
LLAMA_13B = _main("Llama-2-13B", "llama2_13b_openhermes", "4 x H200", 42)


def _pictures(model: str, folder: str, config: str, n_ranks: int) -> Study:
    return Study(
        folder, model, config, f"{n_ranks} x RTX 3090", (42,), ("GPipe", "1F1B"),
        ("none", "apf", "autofreeze", "timelyfreeze"), n_ranks,
    )  # fmt: skip


VIT = _pictures("ViT-L/32", "vit_l32", "vit_l32_imagenet", 8)


def _cut(name: str, partition: str) -> Study:
    study = _pictures(f"ConvNeXt-V2-L by {name}", f"convnextv2_l_{name}", "convnextv2_l_food101", 4)
    return replace(study, keys={"parallelism.partition": partition})


_BY_PARAMETERS = _cut("parameter", "parameters")
# By the times of the runs before.
CONVNEXT = (
    _cut("memory", "memory"),
    _BY_PARAMETERS,
    replace(_cut("time", "time"), profiled=_BY_PARAMETERS.folder),
)

# One run each of the two ends, and a few between; the paper's own values are in its picture alone.
_SWEPT = {
    "timelyfreeze": "freezing.max_freeze_ratio=0.2,0.35,0.5,0.65,0.8",
    "apf": "freezing.apf.threshold=0.0025,0.005,0.01,0.02,0.04",
    "autofreeze": "freezing.autofreeze.percentile=50,60,70,80,90",
}


def single(study: Study, *methods: str, schedule: str = "1F1B") -> Study:
    """Return a study's runs of some methods under one schedule, with its first seed."""
    return replace(study, schedules=(schedule,), methods=methods, seeds=study.seeds[:1])


def controls() -> tuple[Study, ...]:
    """Return the runs of Fig. 6: each method with several values of what controls it."""
    return tuple(
        replace(
            single(LLAMA_1B, "none", method),
            folder="llama3_2_1b_controls",
            vary=vary,
            seeds=LLAMA_1B.seeds,
        )
        for method, vary in _SWEPT.items()
    )


def more_ranks(n_ranks: int, schedule: str, *methods: str) -> Study:
    """Return the runs of Figs. 11 to 13: as many microbatches of 2 rows as ranks.

    128 rows a step cannot be made of batches of 12, so steps have 10 whole batches there.
    """
    rows = 2 * n_ranks
    keys = {
        "training.local_batch_size": rows,
        "training.global_batch_size": 128 if 128 % rows == 0 else 10 * rows,
    }
    return replace(
        single(LLAMA_1B, *methods, schedule=schedule),
        folder=f"llama3_2_1b_{n_ranks}_ranks", hardware=f"{n_ranks} x A6000", n_ranks=n_ranks,
        keys=keys,
    )  # fmt: skip


# Stands in place of a method for the model before training.
BASE = "base"
SCORES = (
    "accuracy_mmlu", "accuracy_hellaswag", "accuracy_arc_challenge", "accuracy_truthfulqa_mc1",
    "accuracy",
)  # fmt: skip
SPEEDS = (
    "accuracy", "average_freeze_ratio", "device_tokens_per_second", "gain_percent", "mfu_percent",
)  # fmt: skip

TOP1 = ("top1_percent", "top1_points", "time_saved_percent", "average_freeze_ratio")

Values = Mapping[str, float]


@functools.cache
def measured() -> Mapping[tuple[str, str, str], Values]:
    """Return the paper's values by model, schedule and method.

    Image classifiers have ``seconds`` of training. To others ``gain_percent`` is added: tokens/s
    over those of none. The model before training is the method ``base`` of the schedule "".
    """
    text = resources.files(__package__).joinpath("measured.csv").read_text()
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in csv.DictReader(text.splitlines()):
        names = row.pop("model"), row.pop("schedule"), row.pop("method")
        found[names] = {key: float(value) for key, value in row.items() if value}
    for (model, schedule, method), values in found.items():
        if method != BASE and "device_tokens_per_second" in values:
            none = found[model, schedule, "none"]["device_tokens_per_second"]
            values["gain_percent"] = 100.0 * (values["device_tokens_per_second"] / none - 1.0)
    return MappingProxyType(found)
