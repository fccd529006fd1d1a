"""Plans under a cap, and the cap under which a loss is estimated to be reached soonest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from timelyfreeze.planning.lp import MAX_ACTIONS_BY_SIMPLEX, solve_freeze_ratios
from timelyfreeze.planning.plan import FreezePlan
from timelyfreeze.planning.progress import VarianceCurve, steps_for_tensors, steps_for_tokens
from timelyfreeze.schedule import PipelineDag
from timelyfreeze.settings import AUTO, OFF, key
from timelyfreeze.timing import DurationBounds

# Caps that are tried; a pipeline that takes long to solve has time for few.
_CAPS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8)
_FEW_CAPS = (0.1, 0.2, 0.35, 0.5)
# For tensors the estimate is flat around its best: times scatter by more than what caps differ, and
# what frozen tensors cost is a formula, not measured. So the smallest cap is taken that keeps this
# fraction of the best one's gain.
_KEPT_GAIN = 0.75


@dataclass(frozen=True)
class SolverChoices:
    """What a plan is solved under; most as for ``solve_freeze_ratios``.

    Attributes:
        max_freeze_ratio: Cap r_max, one number or one per stage; or ``settings.AUTO``.
        whole_stages: Stages that are frozen whole or not at all.
        n_processors: How many ranks of the pipeline can compute at once, or None.
        time_limit_s: Limit on the solver's time, seconds.
        skip_input_grads: What becomes of backwards that nobody needs.
        samples_tokens: Whether tokens are left out; caps then hold for each action.
        measured_ratio: Freeze ratio of what was measured as frozen, in (0, 1].
        input_fraction: Ratio of sampled input gradients over that of their action; 0 for none.
    """

    max_freeze_ratio: float | tuple[float, ...] | str
    whole_stages: tuple[int, ...] = ()
    n_processors: float | None = None
    time_limit_s: float = 60.0
    skip_input_grads: str = OFF
    samples_tokens: bool = False
    measured_ratio: float = 1.0
    input_fraction: float = 0.0


def chosen_plan(
    dag: PipelineDag,
    bounds: DurationBounds,
    choices: SolverChoices,
    curves: Mapping[int, VarianceCurve],
) -> FreezePlan:
    """Return the plan under the cap that was chosen, or under the best one.

    The best is the one that reaches a loss soonest: with the smallest product of batch time and
    estimated number of steps (``progress``); for tensors a smaller one that gains nearly as much is
    preferred. Where no freezing pays, the plan's ``time_to_loss`` says so.

    Args:
        dag: Precedence graph.
        bounds: Bounds that fit it.
        choices: What is solved under.
        curves: What sampling adds, by stage; empty where tensors are frozen or nothing is known.

    Raises:
        ValueError: As ``solve_freeze_ratios``; or if the best cap is asked for and sampling was not
            measured in every stage.
        LpError: As ``solve_freeze_ratios``.
    """
    if choices.max_freeze_ratio != AUTO:
        return _plan(dag, bounds, choices, choices.max_freeze_ratio, curves)
    if choices.samples_tokens and not _is_known(dag, curves):
        raise ValueError(
            "what sampling adds to gradients was not measured in every stage, so no cap can be "
            f"chosen; set {key('warmup')} to 1 or more"
        )
    tried = _CAPS if len(dag.actions) <= MAX_ACTIONS_BY_SIMPLEX else _FEW_CAPS
    caps = [cap for cap in tried if cap <= choices.measured_ratio]
    # The limit is one on all of them: whoever waits for the plan waits no longer.
    each = replace(choices, time_limit_s=choices.time_limit_s / len(caps))
    plans = [_plan(dag, bounds, each, cap, curves) for cap in caps]
    gains = [1.0 - (plan.time_to_loss or 0.0) for plan in plans]
    enough = max(gains)
    if enough > 0.0 and not choices.samples_tokens:
        enough *= _KEPT_GAIN
    return next(plan for plan, gain in zip(plans, gains, strict=True) if gain >= enough)


def _plan(
    dag: PipelineDag,
    bounds: DurationBounds,
    choices: SolverChoices,
    cap: float | tuple[float, ...] | str,
    curves: Mapping[int, VarianceCurve],
) -> FreezePlan:
    plan = solve_freeze_ratios(
        dag,
        bounds,
        max_freeze_ratio=cap,  # type: ignore[arg-type]
        whole_stages=choices.whole_stages,
        n_processors=choices.n_processors,
        time_limit_s=choices.time_limit_s,
        skip_input_grads=choices.skip_input_grads,
        caps_each=choices.samples_tokens,
    )
    return replace(plan, steps_factor=_estimated_steps(dag, plan, choices, curves))


def _estimated_steps(
    dag: PipelineDag,
    plan: FreezePlan,
    choices: SolverChoices,
    curves: Mapping[int, VarianceCurve],
) -> float | None:
    """Return how many times as many steps a plan takes to a loss; None where it is not known."""
    if not choices.samples_tokens:
        return steps_for_tensors(dag, plan.ratios)
    if not _is_known(dag, curves) or choices.input_fraction > 0.0:
        return None  # noise of input gradients grows on its way down, which nobody has measured
    return steps_for_tokens(dag, plan.ratios, curves)


def _is_known(dag: PipelineDag, curves: Mapping[int, VarianceCurve]) -> bool:
    return all(stage in curves for stage in range(dag.n_stages))
