"""The files of a profile: bounds as a training run saves them, and responses to freezing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from timelyfreeze.schedule import ActionKind, PipelineDag, build_dag
from timelyfreeze.settings import ALL_OR_NOTHING, first_stage_mode
from timelyfreeze.timing import DurationBounds, bounds_from_samples
from timelyfreeze.whatif.bounds_file import bounds_file_text
from timelyfreeze.whatif.layer_model import layer_overheads
from timelyfreeze.whatif.times import Pair, StageTimes, complete_times
from torchtitan.freezing.config import JobConfig, pipeline_notes
from torchtitan.freezing.partition.cut import model_sizes
from torchtitan.freezing.profile.bench import Repeats, Response, fit_line, spread
from torchtitan.freezing.profile.runs import Profile


def chosen_responses(profile: Profile, first_stage: str) -> list[Response]:
    """Return one response for each stage, of the first stage the one measured that way."""
    return [r for r in profile.responses if r.first_stage in (None, first_stage)]


def profile_bounds(
    profile: Profile, first_stage: str = ALL_OR_NOTHING
) -> tuple[PipelineDag, DurationBounds]:
    """Return the profiled schedule's graph, and bounds as of a run, without messages."""
    dag = build_dag(profile.order)
    stages = chosen_responses(profile, first_stage)
    samples = {action: stages[action.stage].ends(action.kind) for action in dag.actions}
    unfrozen = {action: high for action, (_, high) in samples.items()}
    frozen = {action: low for action, (low, _) in samples.items()}
    return dag, bounds_from_samples(dag, unfrozen, frozen)


def stage_times(response: Response) -> StageTimes:
    """Return the medians of a stage as times of its actions, whatever the schedule."""
    pairs: dict[ActionKind, Pair] = {}
    halves = [ActionKind.INPUT_BACKWARD] if response.input_ms else []
    for kind in [ActionKind.FORWARD, *response.curves, *halves]:
        low, high = (spread(times).median_ms for times in response.ends(kind))
        pairs[kind] = (min(low, high), high)  # no faster frozen: as ``bounds_from_samples``
    return complete_times(pairs, is_first=response.stage == 0)


def profile_overheads(profile: Profile) -> tuple[StageTimes, StageTimes]:
    """Return what a layer takes, and a stage without; a ValueError if two sizes contradict."""
    one, many = profile.probes
    return layer_overheads(stage_times(one), stage_times(many), many.n_layers)


def bounds_text(
    profile: Profile, job_config: JobConfig, overheads: tuple[StageTimes, StageTimes] | None
) -> str:
    """Return the bounds file, with all that other pipelines are planned by."""
    freezing = job_config.freezing
    first_stage = first_stage_mode(freezing.first_stage, freezing.gradient_rank)
    dag, bounds = profile_bounds(profile, first_stage)
    sizes, (layer, fixed) = model_sizes(job_config), overheads or (None, None)
    of_run = pipeline_notes(
        job_config, profile.order, profile.n_layers, profile.n_processors, sizes
    )
    stages = tuple(stage_times(r) for r in chosen_responses(profile, first_stage))
    notes = replace(of_run, stages=stages, layer=layer, fixed=fixed)
    return bounds_file_text(dag, bounds, notes)


def response_text(profile: Profile, repeats: Repeats, about: Mapping[str, Any]) -> str:
    """Return what to say about the profile, every point with its spread, and the lines, as JSON."""
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
