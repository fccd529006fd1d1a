"""Batches in turns of a pipeline that is solved by hand: 9 ms, 7 under its plan, 6 all frozen."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from timelyfreeze.planning.plan import plan_from_ratios, plan_to_json
from timelyfreeze.schedule.dag import build_dag, start_times
from timelyfreeze.schedule.order import Action, ActionKind, order_to_csv, parse_action, parse_order
from timelyfreeze.timing.bounds import uniform_bounds

ORDER = parse_order(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"])
DAG = build_dag(ORDER)
# Of four backwards that take 2 ms and frozen 1, the best two.
PLANNED = (parse_action("0B1"), parse_action("1B0"))
CAP = "0.5"
OUTSIDE_MS = 0.5


def status_of(main: Callable[[], int]) -> Any:
    """The exit status of a command, argparse's included."""
    try:
        return main()
    except SystemExit as error:
        return error.code


def backward_ms(mode: str, action: Action) -> float:
    """What a backward takes where nothing disturbs."""
    return 1.0 if mode == "everything" or (mode == CAP and action in PLANNED) else 2.0


def one_turn(
    mode: str,
    number: int,
    drift: float,
    backward: Callable[[str, Action], float] = backward_ms,
) -> dict[str, Any]:
    """A batch, as plain data, on a machine that is ``drift`` times as slow as usual."""
    durations = np.array(
        [1.0 if a.kind is ActionKind.FORWARD else backward(mode, a) for a in DAG.actions]
    )
    start = start_times(DAG, durations)
    ranks = []
    for rank in (0, 1):
        mine = np.flatnonzero(DAG.ranks == rank)
        span_ms = (start + durations)[mine].max() - start[mine].min()
        ranks.append(
            {
                "durations_ms": {str(DAG.actions[i]): drift * durations[i] for i in mine},
                "span_ms": drift * span_ms,
            }
        )
    batch_ms = (start + durations).max()
    step_ms = drift * (batch_ms + OUTSIDE_MS)
    return {"mode": mode, "round": number, "ranks": ranks, "step_ms": step_ms}


def batches_text(
    drift: Mapping[str, list[float]],
    backward: Callable[[str, Action], float] = backward_ms,
    *,
    pipeline: str = "real:2",
    schedule: str = "1F1B",
) -> str:
    """The file of a worker; ``drift`` has one entry for each round and mode."""
    bounds = uniform_bounds(DAG, forward_ms=1.0, backward_ms=(1.0, 2.0))
    plan = plan_from_ratios(DAG, bounds, [float(a in PLANNED) for a in DAG.actions])
    n_rounds = len(next(iter(drift.values())))
    turns = [
        one_turn(mode, number, drift[mode][number], backward)
        for number in range(n_rounds)
        for mode in ("nothing", "everything", CAP)
    ]
    return json.dumps(
        {
            "pipeline": pipeline,
            "schedule": schedule,
            "machine": "a machine",
            "order": order_to_csv(ORDER),
            "n_processors": None,
            "p2p_latency_ms": [],
            "plans": {CAP: plan_to_json(plan)},
            "turns": turns,
        }
    )
