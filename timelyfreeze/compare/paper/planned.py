"""Plans beside the paper's measurements: its Tables 1, 4 and 5, told before anything is trained.

A plan file is what ``timelyfreeze plan --json`` writes. Compared are whole steps: a plan's step has
its batches and, where the file of bounds or ``--outside-ms`` tells it, the optimizer's time too.
Splits other than the default are left out, and so are caps that the paper does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timelyfreeze.compare.paper.studies import METHODS, SCHEDULES, Study, measured
from timelyfreeze.files import markdown_table, number_of, parse_json, shown
from timelyfreeze.whatif.grid import DEFAULT_SPLIT

NUMBERS = ("gain", "upper_bound_gain", "mean_ratio")
HEADS = (
    "schedule", "method", "tokens/s: planned", "paper", "gain, %: planned", "paper", "upper bound",
    "freeze ratio: planned", "as a mean over all steps", "paper",
)  # fmt: skip
_UNKNOWN = "-"


@dataclass(frozen=True)
class Planned:
    """What a plan says of one schedule.

    Attributes:
        schedule: Its name.
        gain: Throughput over no freezing, as a fraction.
        upper_bound_gain: The same, were everything frozen.
        mean_ratio: Mean freeze ratio of all backwards, once the plan is in force.
        tokens_per_second: Of a device, under the plan; None if the bounds do not tell the tokens.
        outside_ms: What a step has beside its batches, milliseconds.
    """

    schedule: str
    gain: float
    upper_bound_gain: float
    mean_ratio: float
    tokens_per_second: float | None
    outside_ms: float


def read_plans(paths: Sequence[Path], max_freeze_ratio: float) -> dict[str, Planned]:
    """Return by schedule the plans of some files with the paper's cap and the default split.

    Raises:
        ValueError: If a file is no plan file, a schedule is planned twice, or none is.
    """
    found: dict[str, Planned] = {}
    for path in paths:
        for plan in _read(path, max_freeze_ratio):
            if plan.schedule in found:
                raise ValueError(
                    f"{path} plans {plan.schedule} once more; one plan of each schedule is shown"
                )
            found[plan.schedule] = plan
    if not set(found) & set(SCHEDULES):
        raise ValueError(
            f"{', '.join(map(str, paths))}: no plan with r_max {max_freeze_ratio:g} and the "
            f"{DEFAULT_SPLIT} split of {', '.join(SCHEDULES)}"
        )
    return found


def _read(path: Path, max_freeze_ratio: float) -> list[Planned]:
    try:
        plain = parse_json(path.read_text())
        outside_ms = number_of("outside_ms", plain["outside_ms"])
        return [
            _planned(case, outside_ms)
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


def _planned(case: Mapping[str, Any], outside_ms: float) -> Planned:
    if not isinstance(case["schedule"], str):
        raise ValueError(f"schedule is {shown(case['schedule'])}")
    speed = case["tokens_per_second"]
    speed = None if speed is None else number_of("tokens_per_second", speed)
    numbers = {key: number_of(key, case[key]) for key in NUMBERS}
    return Planned(case["schedule"], tokens_per_second=speed, outside_ms=outside_ms, **numbers)


def plans_beside(study: Study, plans: Mapping[str, Planned]) -> str:
    """Return the table: for each method under each schedule, what is planned and what is measured.

    A hybrid has the plan of TimelyFreeze, since its policy decides which tensors are frozen and not
    how many. The baselines plan nothing.
    """
    rows = [
        row for schedule in SCHEDULES if schedule in plans for row in _rows(study, plans[schedule])
    ]
    about = (
        f"{study.model}, r_max {study.max_freeze_ratio:g}: steps as planned, and as the paper "
        f"measured them on {study.hardware}."
    )
    if any(plan.outside_ms == 0.0 for plan in plans.values()):
        about += (
            " These plans have nothing beside the batches, the paper's steps have the optimizer, "
            "clipping and data in them: tell their time with `timelyfreeze plan --outside-ms`."
        )
    return f"{about}\n\n{markdown_table(HEADS, rows)}"


def _rows(study: Study, plan: Planned) -> Iterator[list[str]]:
    for method in METHODS:
        papers = measured()[study.model, plan.schedule, method]
        speed = plan.tokens_per_second
        cells = [_UNKNOWN] * 5
        if method == "none":
            plain = None if speed is None else speed / (1.0 + plan.gain)
            cells = [_speed(plain), _UNKNOWN, _UNKNOWN, "0.000", "0.000"]
        elif method.startswith("timelyfreeze"):
            cells = [
                _speed(speed), f"{100.0 * plan.gain:+.1f}", f"{100.0 * plan.upper_bound_gain:+.1f}",
                f"{plan.mean_ratio:.3f}", f"{over_all_steps(study, plan.mean_ratio):.3f}",
            ]  # fmt: skip
        yield [
            plan.schedule, method, cells[0], f"{papers['device_tokens_per_second']:.0f}", cells[1],
            f"{papers['gain_percent']:+.1f}", *cells[2:], f"{papers['average_freeze_ratio']:.3f}",
        ]  # fmt: skip


def _speed(tokens_per_second: float | None) -> str:
    return _UNKNOWN if tokens_per_second is None else f"{tokens_per_second:.0f}"


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
