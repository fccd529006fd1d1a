"""Every table and figure of the paper: its content, and its comparisons of runs."""

from __future__ import annotations

import csv
import functools
import itertools
import math
import tomllib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from timelyfreeze.compare.plots import ACCURACY, MODELS
from timelyfreeze.compare.runs.jobs import DEGREE, ROOT, word
from timelyfreeze.compare.runs.run import Run
from timelyfreeze.compare.runs.variants import concerning, parse_variants, read_value

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
METHODS = (
    "none", "apf", "autofreeze", "timelyfreeze", "timelyfreeze+apf", "timelyfreeze+autofreeze",
)  # fmt: skip
# What `items.toml` says.
TOLD: Mapping[str, Any] = tomllib.loads(
    resources.files(__package__).joinpath("items.toml").read_text()
)
Values = Mapping[str, float]


@dataclass(frozen=True)
class Study:
    """Runs made and shown together."""

    folder: str  # below the output; studies of one folder share their runs
    model: str  # as ``measured`` names it
    config: str  # file of all runs, in ``train_configs``, without ending
    hardware: str  # what the paper ran it on
    seeds: tuple[int, ...]
    schedules: tuple[str, ...] = SCHEDULES
    methods: tuple[str, ...] = METHODS
    n_ranks: int = 4
    keys: Mapping[str, Any] = field(default_factory=dict)  # other than the file has them
    vary: tuple[str, ...] = ()  # "key=a,b,c", each value a run of its own
    profiled: str = ""  # folder of a study, the bounds of whose runs say where the model is cut
    is_emulated: bool = False  # one process stands for all ranks
    is_small: bool = False  # a small model stands for the paper's
    paper: Values = field(default_factory=dict)  # of its last method, if ``measured`` has none
    stand_in: Mapping[str, Any] = field(default_factory=dict)  # what the small one has instead

    @property
    def max_freeze_ratio(self) -> float:
        """The cap of its runs."""
        return float(self.settings()["freezing"]["max_freeze_ratio"])

    @property
    def file(self) -> Path:
        """The configuration."""
        return ROOT / "train_configs" / f"{self.config}.toml"

    @property
    def n_runs(self) -> int:
        """Number of runs."""
        return len(self.schedules) * len(self.seeds) * sum(map(self._n_values, self.methods))

    def _n_values(self, method: str) -> int:
        """Return how many values of the varied key a method runs with."""
        return len(parse_variants(self.vary)) if method != "none" else 1

    def has(self, run: Run) -> bool:
        """Return whether a run of its folder is its own."""
        asked = (concerning(run.method, one) for one in parse_variants(self.vary))
        is_asked = any(run.variant == {k: read_value(v) for k, v in one.items()} for one in asked)
        named = (run.schedule in self.schedules, run.method in self.methods, run.seed in self.seeds)
        return is_asked and all(named)

    def settings(self) -> dict[str, Any]:
        """Return the sections of its configuration file."""
        return tomllib.loads(self.file.read_text())

    def hours(self) -> float:
        """Return how long its runs train, at the paper's own speed."""
        training = self.settings()["training"]

        def seconds(schedule: str, method: str) -> float:
            values = measured()[self.model, schedule, method]
            if "seconds" in values:
                return values["seconds"]
            rows = self.keys.get("training.global_batch_size", training["global_batch_size"])
            steps = self.keys.get("training.steps", training["steps"])
            n_tokens = self._n_values(method) * steps * rows * training["seq_len"]
            return float(n_tokens / (self.n_ranks * values["device_tokens_per_second"]))

        trained = (seconds(schedule, m) for schedule in self.schedules for m in self.methods)
        return len(self.seeds) * math.fsum(trained) / 3600.0

    def command(self, output: Path, evaluate: str | None, arguments: Sequence[str]) -> list[str]:
        """Return the words behind ``timelyfreeze compare`` to make or resume the runs."""
        keys = dict(self.keys)
        if self.is_emulated:
            keys |= {"emulation.enable": True, DEGREE: self.n_ranks}
        if self.profiled and (found := sorted((output / self.profiled).rglob("bounds.json"))):
            keys["parallelism.partition_profile"] = str(found[0])
        return [
            "run", str(self.file), str(output / self.folder),
            "--nproc", str(1 if self.is_emulated else self.n_ranks),
            "--schedules", *self.schedules,
            "--methods", *self.methods,
            "--seeds", *map(str, self.seeds),
            *(f"--vary={values}" for values in self.vary),
            *([] if evaluate is None else [f"--evaluate={evaluate}"]),
            "--", *itertools.starmap(word, keys.items()), *arguments,
        ]  # fmt: skip

    def small(self) -> Study:
        """Return the words for a small model, emulated in a single process, with a single seed."""
        if self.is_small:
            return self
        own = {"keys": {}, **self.stand_in}
        return replace(self, **own, seeds=self.seeds[:1], is_emulated=True, is_small=True)


def study_of(told: Mapping[str, Any]) -> Study:
    """Return a study from its description in ``items.toml``."""
    while "of" in told:
        told = {**TOLD["studies"][told["of"]], **{k: v for k, v in told.items() if k != "of"}}
    own: dict[str, Any] = {
        key: tuple(one) if isinstance(one, list) else one for key, one in told.items()
    }
    return Study(stand_in=own.pop("small", {}), **own)


# Stands in place of a method for the model before training.
BASE = "base"


@functools.cache
def measured() -> Mapping[tuple[str, str, str], Values]:
    """Return the paper's values by model, schedule and method.

    Image classifiers have ``seconds`` of training. Others get ``gain_percent``: tokens/s over those
    of none. The model before training is the method ``base`` of the schedule "".
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


TABLE, FIGURE = "table", "figure"
# Those, and the papers of older systems: whatever has items.
KINDS = (TABLE, FIGURE, "pipetransformer", "egeria")
# Ways to show a figure: a plot of `compare show`, or one of `draw`.
COMPARED, DRAWN = "compare", "draw"


@dataclass(frozen=True)
class Item:
    """A table or a figure of the paper."""

    kind: str  # ``TABLE`` or ``FIGURE``, or the system whose table or figure it is
    number: int  # the paper's
    title: str
    studies: tuple[Study, ...] = ()  # the runs that it is made of
    columns: tuple[str, ...] = ()  # of a table: keys of what is set beside the paper's
    plot: tuple[str, str] = ("", "")  # of a figure: who draws it, and the name of the plot
    says: str = ""  # what the paper says of it in numbers, where they are not in a table
    missing: str = ""  # why there is no such thing here

    @property
    def name(self) -> str:
        """Kind and number."""
        return f"{self.kind} {self.number}"

    @property
    def shows_accuracy(self) -> bool:
        """Whether the item shows accuracies, so that runs are scored."""
        return "accuracy" in self.columns or self.plot[1] in (ACCURACY, MODELS)

    def narrowed(self, asked: Namespace) -> Item:
        """Return the item with the runs of some options, and of none, the base of gains."""
        schedules, methods = asked.schedules, asked.methods
        known = {name for s in self.studies for name in (*s.schedules, *s.methods)}
        if unknown := [name for name in (*schedules, *methods) if name not in known]:
            raise ValueError(
                f"{self.name} has no run of {', '.join(unknown)}; it has {', '.join(sorted(known))}"
            )
        kept = []
        for study in self.studies:
            one = study.small() if asked.small else study
            wanted = (*(methods or study.methods), "none")
            one = replace(
                one,
                schedules=tuple(s for s in one.schedules if not schedules or s in schedules),
                methods=tuple(m for m in one.methods if m in wanted),
                seeds=tuple(asked.seeds) or one.seeds,
                is_emulated=asked.emulate or one.is_emulated,
            )
            if one.schedules and ("none" in methods or set(one.methods) != {"none"}):
                kept.append(one)
        return replace(self, studies=tuple(kept))


ITEMS = tuple(
    Item(
        kind, told.get("number", place), told["title"],
        tuple(map(study_of, told.get("studies", ()))),
        tuple(TOLD["columns"].get(told.get("columns"), ())), tuple(told.get("plot", ("", ""))),
        told.get("says", ""), told.get("missing", ""),
    )
    for kind in KINDS
    for place, told in enumerate(TOLD["items"][kind], 1)
)  # fmt: skip
