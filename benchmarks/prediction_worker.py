"""One of the processes that ``prediction_turns.py run`` starts: batches of every mode in turns.

torchrun starts it, with what to do as JSON: ``prediction_turns._run`` says what is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prediction_error import parse_pipeline
from processes import TimedTrainer, machine, run_worker, write_on_first_rank
from turn_times import BATCHES, EVERYTHING, NOTHING


def work(task: dict[str, Any]) -> None:
    """Make the batches of one pipeline; rank 0 writes them."""
    pipeline = parse_pipeline(task["pipeline"])
    keys = {
        "job.config_file": task["config"],
        "job.dump_folder": task["folder"],
        "parallelism.pipeline_parallel_degree": pipeline.ranks,
        "parallelism.pipeline_parallel_schedule": task["schedule"],
        "freezing.max_freeze_ratio": max(task["caps"]),
        "freezing.monitoring": "halves",  # there nothing, and everything, is frozen
    }
    emulates = ["--emulation.enable"] if pipeline.is_emulated else []
    timed = TimedTrainer(keys, [*emulates, *task["trainer"]])
    write_on_first_rank(Path(task["folder"]) / BATCHES, _batches(timed, task))
    timed.trainer.close()


def _batches(timed: TimedTrainer, task: dict[str, Any]) -> dict[str, Any] | None:
    """Train past the ramp, then in turns; return the batches as plain data on rank 0."""
    import torch.distributed as dist

    from timelyfreeze.planning import plan_to_json
    from timelyfreeze.runtime import Exchange
    from timelyfreeze.schedule import order_to_csv

    controller, exchange = timed.controller, Exchange()
    phases = controller.settings.phases
    for step in range(1, phases.last_ramp_step + 2):
        timed.step_ms(step)
    if controller.plan is None:
        raise SystemExit(f"there is no plan: {controller.planner.failure}")
    solutions = _solutions(controller, task["caps"], exchange)
    seen: list[Any] = []
    controller.collect()
    controller.on_batch = seen.append
    # Steps of the phases that freeze nothing and everything; not the last one, which solves.
    modes = {NOTHING: phases.last_steps[phases.phase(phases.last_warmup_step + 1)]}
    modes[EVERYTHING] = phases.last_monitor_step - 1
    modes |= dict.fromkeys(solutions, phases.last_ramp_step + 2)
    made: list[tuple[str, int, int, float]] = []
    for number in range(task["rounds"]):
        for mode, step in modes.items():
            if mode in solutions:
                controller.follow(solutions[mode])
            dist.barrier()
            made += [(mode, number, i, timed.step_ms(step)) for i in range(task["batches"])]
    controller.collect()
    everyone = exchange.gather([_plain(one.record) for one in seen])
    if everyone is None:
        return None
    turns = [
        {"mode": mode, "round": number, "step_ms": step_ms, "ranks": list(ranks)}
        for (mode, number, i, step_ms), *ranks in zip(made, *everyone, strict=True)
        if i > 0
    ]
    return {
        "pipeline": task["pipeline"],
        "schedule": task["schedule"],
        "machine": machine(),
        "order": order_to_csv(controller.order),
        "n_processors": controller.planner.choices.n_processors,
        "p2p_latency_ms": [[*link, ms] for link, ms in controller.bounds.p2p_latency_ms.items()],
        "plans": {cap: plan_to_json(solved.plan) for cap, solved in solutions.items()},
        "turns": turns,
    }


def _plain(record: Any) -> dict[str, Any]:
    durations_ms = {str(action): ms for action, ms in record.durations_ms.items()}
    return {"durations_ms": durations_ms, "span_ms": record.span_ms}


def _solutions(controller: Any, caps: Sequence[float], exchange: Any) -> dict[str, Any]:
    """Solve for each cap, on rank 0, from the bounds that monitoring has given."""
    from timelyfreeze.planning import solution_from_plain, solution_to_plain, solve_from_bounds

    solved = {}
    for cap in caps:
        plain = None
        if exchange.rank == 0:
            choices = replace(controller.planner.choices, max_freeze_ratio=cap)
            solution = solve_from_bounds(controller.order, controller.bounds, choices)
            plain = solution_to_plain(solution)
        solved[f"{cap:g}"] = solution_from_plain(exchange.broadcast(plain))
    return solved


if __name__ == "__main__":
    run_worker("prediction_turns.py", work)
