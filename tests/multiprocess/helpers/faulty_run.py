"""One process of a training run that something happens to.

Usage: torchrun --nproc_per_node=N tests/multiprocess/helpers/faulty_run.py FAULT.json ARGUMENTS

It is the entry point that users start, but for three things: weights and measured times depend on
names alone, so that runs can be compared bit for bit; the fault happens; and a run that comes to
its end writes its weights into the dump folder, ``weights_R.pt``. A fault is a JSON object:

    "at": "step", or "checkpoint": when half of that step's checkpoint is written; "hand_over" or
        "take_over": in the midst of an elastic run's first move; "report": in the midst of
        writing the summary, for which there is no step
    "step", "rank": when and to whom
    "signal": sent to the process itself, or, with "to": "agent", to torchrun
    "max_bytes": no file of that rank may grow beyond it from then on
    "full": the losses of the run go to a disk that is full from then on
    "poison": a weight of that rank is not finite from then on
    "rows_end": all ranks run out of rows in that step
    "solver": "absent", "hangs" or "stopped", which asks the rank that solves to stop
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from hanging_solver import hang, solve_while_stopped, solve_without_highspy
from launcher import spare_last_pause
from run_scenarios import add_tiny_flavors, fix_weights, use_fake_clock, whole
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from torchtitan.freezing.launch import launch


class Fault:
    """Something that happens once."""

    def __init__(self, settings):
        self.settings = settings
        self.has_happened = False

    def is_due(self, place, step):
        due = {"at": "step", "step": None, "rank": 0, **self.settings}
        is_here = (due["at"], due["step"], due["rank"]) == (place, step, dist.get_rank())
        return is_here and not self.has_happened

    def happen(self, trainer):
        self.has_happened = True
        if "max_bytes" in self.settings:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.settings["max_bytes"], -1))
        if "full" in self.settings:
            losses = trainer.metrics_processor.recorder.run.folder / "losses.csv"
            losses.unlink()
            losses.symlink_to("/dev/full")
        if "poison" in self.settings:
            with torch.no_grad():
                next(trainer.model_parts[-1].parameters()).fill_(float("nan"))
        if "signal" in self.settings:
            target = os.getppid() if self.settings.get("to") == "agent" else os.getpid()
            os.kill(target, signal.Signals[self.settings["signal"]])

    def spoil_writing(self, trainer):
        write_data = FileSystemWriter.write_data

        def half(writer, plan, planner):
            written = write_data(writer, plan, planner)
            if self.is_due("checkpoint", trainer.step):
                for path in Path(writer.path).glob(f"__{dist.get_rank()}_*.distcp"):
                    os.truncate(path, path.stat().st_size // 2)
                self.happen(trainer)
            return written

        FileSystemWriter.write_data = half

    def spoil_report(self):
        for name in ("write_text", "write_bytes"):
            setattr(Path, name, self._half_of_summaries(getattr(Path, name)))

    def _half_of_summaries(self, write):
        def half(path, content, *args):
            if path.name.startswith("summary.json") and self.is_due("report", None):
                write(path, content[: len(content) // 2])
                self.happen(None)
            return write(path, content, *args)

        return half

    def spoil_moving(self):
        from torchtitan.checkpoints.handover import MemoryCheckpoint

        def spoilt(place, real):
            def method(*args):
                if self.is_due(place, None):
                    self.happen(None)
                return real(*args)

            return method

        for place, name in {"hand_over": "write_data", "take_over": "read_data"}.items():
            setattr(MemoryCheckpoint, name, spoilt(place, getattr(MemoryCheckpoint, name)))

    def spoil_solver(self):
        import timelyfreeze.control.plans.planner

        if self.settings.get("solver") == "absent":
            timelyfreeze.control.plans.planner.solve_from_times = solve_without_highspy
        if self.settings.get("solver") == "hangs":
            timelyfreeze.control.plans.planner.solve_from_times = hang
        if self.settings.get("solver") == "stopped":
            timelyfreeze.control.plans.planner.solve_from_times = solve_while_stopped


def faulty(base, fault):
    """Return a trainer class to which ``fault`` happens."""

    class Faulty(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            fix_weights(self.model_parts)
            if self.controller is not None:
                use_fake_clock(self.controller, {})
            fault.spoil_writing(self)

        def _shared_processors(self):
            return None

        def batch_generator(self, data_iterable):
            for batch in super().batch_generator(data_iterable):
                if self.step == fault.settings.get("rows_end"):
                    from torchtitan.components.dataloader import DataloaderExhaustedError

                    raise DataloaderExhaustedError
                yield batch

        def forward_backward_step(self, **kwargs):
            loss = super().forward_backward_step(**kwargs)
            if fault.is_due("step", self.step):
                fault.happen(self)
            return loss

        def train(self):
            super().train()
            if self.leave is not None and self.leave.config is not None:
                return  # the run goes on
            weights = {n: whole(p) for m in self.model_parts for n, p in m.named_parameters()}
            folder = Path(self.job_config.job.dump_folder)
            torch.save(weights, folder / f"weights_{dist.get_rank()}.pt")

    return Faulty


def main():
    fault, args = Fault(json.loads(Path(sys.argv[1]).read_text())), sys.argv[2:]
    fault.spoil_solver()
    fault.spoil_moving()
    fault.spoil_report()
    add_tiny_flavors()
    import torchtitan.train as titan_train

    import torchtitan.freezing.trainer as freezing_trainer

    spare_last_pause(titan_train)
    freezing_trainer.FreezingTrainer = faulty(freezing_trainer.FreezingTrainer, fault)
    return launch(args, local_rank=int(os.environ["LOCAL_RANK"]))


if __name__ == "__main__":
    sys.exit(main())
