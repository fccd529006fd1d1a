"""One of the processes that ``gain.py plain`` and ``gain`` start: two trainers in turns.

torchrun starts it, with what to do as JSON: ``gain.launch`` says what is in it.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PHASES = {"last_warmup_step": 4, "last_monitor_step": 36, "last_ramp_step": 38}


def main(arguments: list[str]) -> None:
    """Run the pair that the one argument says in JSON; rank 0 writes the row."""
    if len(arguments) != 1:
        sys.exit("error: gain.py starts this in each of its processes; run that")
    import torch.distributed as dist
    from torchtitan.tools.logging import init_logger

    init_logger()
    task = json.loads(arguments[0])
    is_plain = task["what"] == "plain"
    before = Turns(task, "none", upstream=is_plain)
    row = compare(task, before, Turns(task, "none" if is_plain else task["method"]))
    if dist.get_rank() == 0:
        (Path(task["folder"]) / "row.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


class Turns:
    """A trainer that runs a few steps at a time, past its ramp if it freezes."""

    def __init__(self, task: dict[str, Any], method: str, *, upstream: bool = False) -> None:
        from torchtitan.protocols import train_spec

        from torchtitan.freezing.launch import prepare

        keys = {
            "metrics.log_freq": 1_000_000,
            "training.steps": 10_000,
            "job.config_file": task["config"],
            "job.dump_folder": f"{task['folder']}/{method}{upstream}",
            "parallelism.pipeline_parallel_degree": task["ranks"],
            "parallelism.pipeline_parallel_schedule": task["schedule"],
            "freezing.method": method,
            **{f"freezing.{key}": value for key, value in PHASES.items()},
        }
        if task["first_stage"]:
            keys["freezing.first_stage"] = task["first_stage"]
        if task["what"] == "plain":
            # A data set and a flavor that upstream has too.
            keys |= {
                "training.dataset": "c4_test",
                "training.dataset_path": "tests/assets/c4_test",
                "model.flavor": "debugmodel",
            }
        keywords = [f"--{key}={value}" for key, value in keys.items()]
        config = prepare([*keywords, *task["settings"]])
        if upstream:
            from torchtitan.train import Trainer as Chosen

            train_spec._extra_train_specs.clear()
        else:
            from torchtitan.freezing.trainer import FreezingTrainer as Chosen
        self._trainer: Any = Chosen(config)
        self.controller = getattr(self._trainer, "controller", None)
        self._data = self._trainer.batch_generator(self._trainer.dataloader)
        self.step_ms: list[float] = []
        plans = self.controller is not None and self.controller.plans
        self.run(PHASES["last_ramp_step"] + 2 if plans else PHASES["last_warmup_step"] + 3)
        self.step_ms.clear()

    def run(self, n_steps: int) -> None:
        """Run ``n_steps`` and note how long each took; ranks start together."""
        import torch.distributed as dist

        dist.barrier()
        for _ in range(n_steps):
            started = time.perf_counter()
            self._trainer.step += 1
            self._trainer.train_step(self._data)
            self.step_ms.append(1e3 * (time.perf_counter() - started))


def compare(task: dict[str, Any], before: Turns, after: Turns) -> dict[str, Any]:
    """Let two trainers take turns and describe the difference."""
    controller, n_steps, median = after.controller, task["steps"], statistics.median
    if controller is not None:
        controller.collect()
    ratios = []
    for _ in range(task["blocks"]):
        before.run(n_steps)
        after.run(n_steps)
        ratios.append(median(before.step_ms[-n_steps:]) / median(after.step_ms[-n_steps:]))
    row: dict[str, Any] = {"schedule": task["schedule"]}
    if controller is not None:
        row["method"] = task["method"]
        if controller.plans:
            row["first stage"] = task["first_stage"]
    ratio = median(ratios)
    row["before, ms/step"] = round(median(before.step_ms), 1)
    row["after, ms/step"] = round(median(after.step_ms), 1)
    row["tokens/s ratio (min..max)"] = f"{ratio:.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
    if controller is None:
        return row
    metrics = controller.collect()
    batch_ms = median(ms for values in metrics.batch_ms.values() for ms in values)
    row["batch measured, ms"] = round(batch_ms, 1)
    row["gain measured"] = f"{100 * (ratio - 1):+.1f}%"
    if controller.plans:
        row |= describe_plan(controller.plan, batch_ms, ratio)
    row["ratios applied"] = _two_digits(metrics.applied_stage_ratios.values())
    return row


def _two_digits(ratios: Iterable[float]) -> str:
    return " ".join(f"{ratio:.2f}" for ratio in ratios)


def describe_plan(plan: Any, batch_ms: float, ratio: float) -> dict[str, Any]:
    """Return what the plan promised beside what was measured."""
    return {
        "batch predicted, ms": round(plan.batch_ms, 1),
        "error": f"{100 * (batch_ms / plan.batch_ms - 1):+.1f}%",
        "gain promised": f"{100 * plan.gain:+.1f}%",
        "kept": f"{(ratio - 1) / plan.gain:.0%}" if plan.gain > 0 else "-",
        "upper bound": f"{100 * plan.upper_bound_gain:+.1f}%",
        "mean ratios": _two_digits(plan.stage_mean_ratios().values()),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
