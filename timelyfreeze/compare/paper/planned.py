"""Plans beside the paper's measurements: its Tables 1, 4 and 5, told before anything is trained.

A plan file is what ``timelyfreeze plan --json`` writes. Compared are whole steps: a plan's step has
its batches and, where the file of bounds or ``--outside-ms`` tells it, the optimizer's time too.
Splits other than the default are left out, and so are caps that the paper does not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from timelyfreeze.compare.paper.show import UNKNOWN
from timelyfreeze.compare.paper.studies import METHODS, SCHEDULES, Study, Values, measured
from timelyfreeze.files import Within, markdown_table, parse_json, read_as, shown
from timelyfreeze.whatif.grid import DEFAULT_SPLIT

NUMBERS = ("gain", "upper_bound_gain", "mean_ratio")
_NUMBER = Annotated[float, Within(-math.inf)]
# Title, whose value it is, its key and its format.
_OURS, _PAPERS = 0, 1
_COLUMNS = (
    ("tokens/s: planned", _OURS, "device_tokens_per_second", ".0f"),
    ("paper", _PAPERS, "device_tokens_per_second", ".0f"),
    ("gain, %: planned", _OURS, "gain_percent", "+.1f"),
    ("paper", _PAPERS, "gain_percent", "+.1f"),
    ("upper bound", _OURS, "upper_bound_percent", "+.1f"),
    ("freeze ratio: planned", _OURS, "planned_ratio", ".3f"),
    ("as a mean over all steps", _OURS, "average_freeze_ratio", ".3f"),
    ("paper", _PAPERS, "average_freeze_ratio", ".3f"),
)
# What a plan file says of one schedule: ``NUMBERS`` of a case, "tokens_per_second" of a device
# under the plan if it is told, and "outside_ms", what a step has beside its batches.
Planned = Mapping[str, float]


def read_plans(paths: Sequence[Path], max_freeze_ratio: float) -> dict[str, Planned]:
    """Return by schedule the plans of some files with the paper's cap and the default split.

    Raises:
        ValueError: If a file is no plan file, a schedule is planned twice, or none is.
    """
    found: dict[str, Planned] = {}
    for path in paths:
        for schedule, plan in _read(path, max_freeze_ratio):
            if schedule in found:
                raise ValueError(
                    f"{path} plans {schedule} once more; one plan of each schedule is shown"
                )
            found[schedule] = plan
    if not set(found) & set(SCHEDULES):
        raise ValueError(
            f"{', '.join(map(str, paths))}: no plan with r_max {max_freeze_ratio:g} and the "
            f"{DEFAULT_SPLIT} split of {', '.join(SCHEDULES)}"
        )
    return found


def _read(path: Path, max_freeze_ratio: float) -> list[tuple[str, Planned]]:
    try:
        plain = parse_json(path.read_text())
        outside_ms = read_as(_NUMBER, plain["outside_ms"], "outside_ms")
        return [
            (_schedule(case), {"outside_ms": outside_ms, **_numbers(case)})
            for case in plain["cases"]
            if case["split"] == DEFAULT_SPLIT and case["max_freeze_ratio"] == max_freeze_ratio
        ]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except KeyError as error:
        reason = f"it has no {error}"
    except (ValueError, TypeError) as error:
        reason = str(error)
    raise ValueError(f"{path} is not what `timelyfreeze plan --json` writes: {reason}")


def _schedule(case: Mapping[str, Any]) -> str:
    if not isinstance(schedule := case["schedule"], str):
        raise ValueError(f"schedule is {shown(schedule)}")
    return schedule


def _numbers(case: Mapping[str, Any]) -> dict[str, float]:
    speed = "tokens_per_second"
    known = NUMBERS if case[speed] is None else (*NUMBERS, speed)
    return {key: read_as(_NUMBER, case[key], key) for key in known}


def plans_beside(study: Study, plans: Mapping[str, Planned]) -> str:
    """Return the table: for each method under each schedule, what is planned and what is measured.

    A hybrid has the plan of TimelyFreeze, since its policy decides which tensors are frozen and not
    how many. The baselines plan nothing.
    """
    rows = []
    for schedule in (schedule for schedule in SCHEDULES if schedule in plans):
        for method in METHODS:
            values = (
                _ours(study, plans[schedule], method),
                measured()[study.model, schedule, method],
            )
            cells = (
                format(values[whose][key], form) if key in values[whose] else UNKNOWN
                for _, whose, key, form in _COLUMNS
            )
            rows.append([schedule, method, *cells])
    about = (
        f"{study.model}, r_max {study.max_freeze_ratio:g}: steps as planned, and as the paper "
        f"measured them on {study.hardware}."
    )
    if any(plan["outside_ms"] == 0.0 for plan in plans.values()):
        about += (
            " These plans have nothing beside the batches, the paper's steps have the optimizer, "
            "clipping and data in them: tell their time with `timelyfreeze plan --outside-ms`."
        )
    heads = ["schedule", "method", *(title for title, *_ in _COLUMNS)]
    return f"{about}\n\n{markdown_table(heads, rows)}"


def _ours(study: Study, plan: Planned, method: str) -> Values:
    """Return what a plan says of a method."""
    ours: dict[str, float] = {}
    speed = plan.get("tokens_per_second")
    if method == "none":
        ours = {"planned_ratio": 0.0, "average_freeze_ratio": 0.0}
        speed = None if speed is None else speed / (1.0 + plan["gain"])
    elif method.startswith("timelyfreeze"):
        ours = {
            "gain_percent": 100.0 * plan["gain"],
            "upper_bound_percent": 100.0 * plan["upper_bound_gain"],
            "planned_ratio": plan["mean_ratio"],
            "average_freeze_ratio": over_all_steps(study, plan["mean_ratio"]),
        }
    else:
        return ours
    return ours if speed is None else {**ours, "device_tokens_per_second": speed}


def over_all_steps(study: Study, ratio: float) -> float:
    """Return the mean freeze ratio over all steps of a run whose plan freezes ``ratio``.

    Phases are those of Algorithm 1: nothing up to T_w and in the first half of monitoring, all in
    its second half, then a ramp up to T_f, step by step.
    """
    settings = study.settings()
    freezing, n_steps = settings["freezing"], settings["training"]["steps"]
    warmup, monitor, ramp = (
        freezing[key] for key in ("last_warmup_step", "last_monitor_step", "last_ramp_step")
    )
    all_frozen = monitor - (warmup + monitor) // 2
    ramped = sum(ratio * (t - monitor) / (ramp - monitor) for t in range(monitor + 1, ramp + 1))
    return float((all_frozen + ramped + ratio * (n_steps - ramp)) / n_steps)
