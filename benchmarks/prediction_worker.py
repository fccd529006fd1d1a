"""One of the processes that ``prediction_turns.py run`` starts: batches of every mode in turns.

torchrun starts it, with what to do as JSON: ``prediction_turns._run`` says what is in it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prediction_jobs import EMULATED
from turn_times import EVERYTHING, NOTHING, PASSES


def work(task: dict[str, Any]) -> None:
    """Make the batches of one pipeline; rank 0 writes them."""
    import torch.distributed as dist
    from torchtitan.tools.logging import init_logger

    init_logger()
    trainer = _trainer(task)
    batches = _batches(trainer, task)
    if dist.get_rank() == 0:
        path = Path(task["folder"]) / PASSES
        path.with_suffix(".part").write_text(json.dumps(batches))
        path.with_suffix(".part").rename(path)
    trainer.close()
    dist.barrier()
    dist.destroy_process_group()


def _trainer(task: dict[str, Any]) -> Any:
    """Build the trainer as the task says."""
    from torchtitan.freezing.launch import prepare

    kind, _, ranks = task["pipeline"].partition(":")
    keys = {
        "job.config_file": task["config"],
        "job.dump_folder": task["folder"],
        "metrics.log_freq": 1000000,
        "training.steps": 1000000,
        "lr_scheduler.total_steps": 10000,
        "parallelism.pipeline_parallel_degree": ranks,
        "parallelism.pipeline_parallel_schedule": task["schedule"],
        "freezing.max_freeze_ratio": max(task["caps"]),
    }
    arguments = [f"--{key}={value}" for key, value in keys.items()]
    emulates = ["--emulation.enable"] if kind == EMULATED else []
    config = prepare([*arguments, *emulates, *task["trainer"]])
    from torchtitan.freezing.trainer import FreezingTrainer

    return FreezingTrainer(config)


def _batches(trainer: Any, task: dict[str, Any]) -> dict[str, Any] | None:
    """Train past the ramp, then in turns; return the passes as plain data on rank 0."""
    import torch.distributed as dist

    from timelyfreeze.planning import plan_to_json
    from timelyfreeze.runtime import Exchange
    from timelyfreeze.schedule import order_to_csv

    controller, exchange = trainer.controller, Exchange()
    phases = controller.settings.phases
    data = trainer.batch_generator(trainer.dataloader)

    def run(step: int) -> float:
        began = time.perf_counter()
        trainer.step = step
        trainer.train_step(data)
        return 1e3 * (time.perf_counter() - began)

    for step in range(1, phases.last_ramp_step + 2):
        run(step)
    if controller.plan is None:
        raise SystemExit(f"there is no plan: {controller.failure}")
    solutions = _solutions(controller, task["caps"], exchange)
    seen: list[Any] = []
    controller.collect()
    controller.on_batch = seen.append
    # Steps of the phases that freeze nothing and everything; not the last one, which solves.
    modes = {NOTHING: phases.last_step_of(phases.phase(phases.last_warmup_step + 1))}
    modes[EVERYTHING] = phases.last_monitor_step - 1
    modes |= dict.fromkeys(solutions, phases.last_ramp_step + 2)
    made: list[tuple[str, int, int, float]] = []
    for number in range(task["rounds"]):
        for mode, step in modes.items():
            if mode in solutions:
                controller.follow(solutions[mode])
            dist.barrier()
            made += [(mode, number, i, run(step)) for i in range(task["batches"])]
    controller.collect()
    mine = [
        {
            "durations_ms": {str(a): ms for a, ms in one.record.durations_ms.items()},
            "span_ms": one.record.span_ms,
        }
        for one in seen
    ]
    everyone = exchange.gather(mine)
    if everyone is None:
        return None
    turns = [
        {"mode": mode, "round": number, "step_ms": step_ms, "ranks": list(ranks)}
        for (mode, number, i, step_ms), *ranks in zip(made, *everyone, strict=True)
        if i > 0
    ]
    from gain import machine

    return {
        "pipeline": task["pipeline"],
        "schedule": task["schedule"],
        "machine": machine(),
        "order": order_to_csv(controller.order),
        "n_processors": controller.solver_choices.n_processors,
        "transfers_ms": [[*link, ms] for link, ms in controller.bounds.transfers_ms.items()],
        "plans": {cap: plan_to_json(solved.plan) for cap, solved in solutions.items()},
        "turns": turns,
    }


def _solutions(controller: Any, caps: Sequence[float], exchange: Any) -> dict[str, Any]:
    """Solve for each cap, on rank 0, from the bounds that monitoring has given."""
    from dataclasses import replace

    from timelyfreeze.planning import solution_from_plain, solution_to_plain, solve_from_bounds

    solved = {}
    for cap in caps:
        plain = None
        if exchange.rank == 0:
            choices = replace(controller.solver_choices, max_freeze_ratio=cap)
            plain = solution_to_plain(
                solve_from_bounds(controller.order, controller.bounds, choices)
            )
        solved[f"{cap:g}"] = solution_from_plain(exchange.broadcast(plain))
    return solved


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("error: prediction_turns.py starts this in each of its processes; run that")
    work(json.loads(sys.argv[1]))
