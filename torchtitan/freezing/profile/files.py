"""The files of a profile: bounds as a training run saves them, and responses to freezing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from timelyfreeze.schedule import ActionKind, PipelineDag, build_dag
from timelyfreeze.settings import ALL_OR_NOTHING, first_stage_mode
from timelyfreeze.timing import DurationBounds, bounds_from_samples
from timelyfreeze.whatif.bounds_file import bounds_file_text
from timelyfreeze.whatif.layer_model import layer_overheads
from timelyfreeze.whatif.times import Pair, StageTimes, complete_times
from torchtitan.freezing.config import JobConfig, pipeline_notes
from torchtitan.freezing.partition import model_sizes
from torchtitan.freezing.profile.bench import Repeats, Response, fit_line, spread
from torchtitan.freezing.profile.runs import Profile


def chosen_responses(profile: Profile, first_stage: str) -> list[Response]:
    """Return one response for each stage, of the first stage the one measured that way."""
    return [r for r in profile.responses if r.first_stage in (None, first_stage)]


def profile_bounds(
    profile: Profile, first_stage: str = ALL_OR_NOTHING
) -> tuple[PipelineDag, DurationBounds]:
    """Return the graph of the profiled schedule and the bounds that a run would have measured.

    Times of messages are left out. ``first_stage`` says how the first stage is frozen.
    """
    dag = build_dag(profile.order)
    stages = chosen_responses(profile, first_stage)
    samples = {action: _samples(stages[action.stage], action.kind) for action in dag.actions}
    unfrozen = {action: high for action, (_, high) in samples.items()}
    frozen = {action: low for action, (low, _) in samples.items()}
    return dag, bounds_from_samples(dag, unfrozen, frozen)


def _samples(response: Response, kind: ActionKind) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the times of an action with everything and with nothing frozen."""
    if kind is ActionKind.FORWARD:
        return response.forward_ms, response.forward_ms
    if kind is ActionKind.INPUT_BACKWARD:
        return response.input_ms, response.input_ms
    return response.ends(kind)


def stage_times(response: Response) -> StageTimes:
    """Return the medians of a stage as times of its actions, whatever the schedule."""
    pairs: dict[ActionKind, Pair] = {}
    halves = [ActionKind.INPUT_BACKWARD] if response.input_ms else []
    for kind in [ActionKind.FORWARD, *response.curves, *halves]:
        low, high = (spread(times).median_ms for times in _samples(response, kind))
        pairs[kind] = (min(low, high), high)  # no faster frozen: as ``bounds_from_samples``
    return complete_times(pairs, is_first=response.stage == 0)


@dataclass(frozen=True)
class Overheads:
    """Overhead of a layer and of a stage without layers."""

    layer: StageTimes
    fixed: StageTimes


def profile_overheads(profile: Profile) -> Overheads:
    """Return the overheads at which layers move.

    Raises:
        ValueError: If the times of stages of two sizes contradict each other.
    """
    one, many = profile.probes
    return Overheads(*layer_overheads(stage_times(one), stage_times(many), many.n_layers))


def bounds_text(profile: Profile, job_config: JobConfig, overheads: Overheads | None) -> str:
    """Return the bounds file, with everything noted that planning for other pipelines needs.

    ``overheads`` is None where they could not be told.
    """
    freezing = job_config.freezing
    first_stage = first_stage_mode(freezing.first_stage, freezing.gradient_rank)
    dag, bounds = profile_bounds(profile, first_stage)
    notes = replace(
        pipeline_notes(
            job_config,
            profile.order,
            profile.n_layers,
            profile.n_processors,
            model_sizes(job_config),
        ),
        stages=tuple(stage_times(r) for r in chosen_responses(profile, first_stage)),
        layer=None if overheads is None else overheads.layer,
        fixed=None if overheads is None else overheads.fixed,
    )
    return bounds_file_text(dag, bounds, notes)


def response_text(profile: Profile, repeats: Repeats, about: Mapping[str, Any]) -> str:
    """Return the responses as JSON: every point with its spread, and the lines through them.

    ``about`` is what else to say: configuration, device, versions.
    """
    plain = {
        **about,
        "cold_rounds": repeats.cold,
        "kept_rounds": repeats.kept,
        "peak_gib_by_stage": [None if peak < 0 else peak / 1024**3 for peak in profile.peak_bytes],
        "stages": [_plain(response) for response in profile.responses],
        "probes": [_plain(response) for response in profile.probes],
    }
    return json.dumps(plain, indent=2) + "\n"


def _plain(response: Response) -> dict[str, Any]:
    return {
        "stage": response.stage,
        "n_layers": response.n_layers,
        "first_stage": response.first_stage,
        "forward": asdict(spread(response.forward_ms)),
        "input": asdict(spread(response.input_ms)) if response.input_ms else None,
        "curves": {
            kind.value: {
                "line": asdict(fit_line(points)),
                "points": [
                    {"ratio": p.ratio, "fraction": p.fraction, **asdict(spread(p.times_ms))}
                    for p in points
                ],
            }
            for kind, points in response.curves.items()
        },
    }


HEADING = (
    "stage", "layers", "F", "I", "action", "unfrozen", "frozen", "farthest from line", "R2"
)  # fmt: skip


def table_rows(response: Response) -> Iterator[tuple[str, ...]]:
    """Yield the rows of one response below ``HEADING``, milliseconds."""
    name = "probe" if response.stage is None else str(response.stage)
    if response.first_stage is not None:
        name += f" {response.first_stage}"
    for kind, points in response.curves.items():
        line = fit_line(points)
        miss = f"{line.largest_miss_ms:+.2f} ({line.largest_miss:+.1%})"
        yield (
            name,
            str(response.n_layers),
            f"{spread(response.forward_ms).median_ms:.2f}",
            f"{spread(response.input_ms).median_ms:.2f}" if response.input_ms else "",
            kind.value,
            f"{line.unfrozen_ms:.2f}",
            f"{line.frozen_ms:.2f}",
            "two points" if len(points) == 2 else miss,
            f"{line.r_squared:.4f}",
        )
