"""What the paper measured: Tables 1 and 4 to 10 of arXiv:2602.05754.

``measured.csv`` was copied by a script from the paper's text. Its columns are called as those of a
comparison (``compare.metrics.COLUMNS``); accuracies are in percent, tokens/s those of one device.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

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
