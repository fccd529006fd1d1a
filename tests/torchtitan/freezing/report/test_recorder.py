"""One record of a run that moves to another pipeline: its files, and what adds up."""

import errno
import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchtitan.components.metrics as titan_metrics
from torchtitan.components.metrics import BaseLogger
from torchtitan.distributed import ParallelDims

from tests.timelyfreeze.helpers.pipelines import TWO_BY_TWO
from tests.torchtitan.helpers.job_configs import put
from tests.torchtitan.helpers.report_runs import run_in
from tests.torchtitan.helpers.summaries import make_summary
from timelyfreeze.control.collected import CollectedMetrics
from timelyfreeze.planning.plan import plan_from_ratios
from timelyfreeze.records.convergence import StepLog
from timelyfreeze.records.summary import read_summary
from timelyfreeze.records.tables import (
    LOSSES,
    MOVES,
    RESPONSES,
    STEPS,
    FrozenCount,
    LossRow,
    Move,
)
from timelyfreeze.schedule import order_to_csv
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import ScheduleOrder, parse_order
from timelyfreeze.settings.phases import Phase, PhaseSchedule, Step
from timelyfreeze.timing.bounds import uniform_bounds
from torchtitan.freezing.report.parts import RunPart
from torchtitan.freezing.report.recorder import RunRecorder, record
from torchtitan.settings.job_config import JobConfig

START = make_summary(method="fixed", n_devices=4, ranks_per_replica=4, steps=8)
LONG = parse_order([f"{rank}F0 {rank}B0" for rank in range(4)])
SHORT = parse_order(TWO_BY_TWO)
DAG = build_dag(SHORT)


class Controller(SimpleNamespace):
    """A controller of the stable phase, without batches."""

    def __init__(self, order: ScheduleOrder, average_ratio: float) -> None:
        super().__init__(
            step=Step(7, Phase.STABLE), cache=None, checks=None,
            collect=lambda scale=None: CollectedMetrics({}, {0: 1.0}, average_ratio),
            frozen_counts=lambda: [FrozenCount(0, 0, "w", 4, 2, 1)],
            expected_batch_ms=lambda: None, expected_stage_ratios=dict,
            active_plan=SimpleNamespace(order=order, bounds=None, switched_off=None),
            log=SimpleNamespace(on_batch=None),
            turns=SimpleNamespace(turning_ms=lambda: 0.0), phases=PhaseSchedule.unplanned(4),
        )  # fmt: skip


OF_THE_PLAN = ("bounds.json", "plan.json", "timelines/measured_upper_bound.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run of 8 steps of 400 tokens, of which the last 4 are in a shorter pipeline.

    Its 4 processes are a replica before, then two replicas, which have 200 tokens each.
    """
    config = JobConfig()
    put(config, "freezing", method="fixed", gradient_rank=0)
    put(config, "freezing", elastic=replace(config.freezing.elastic, enable=True))
    config.training.steps = 8
    config.plots.enable = False
    device = torch.device("cpu")
    run = run_in(tmp_path, START, config=config, n_layers=4, device=device)
    recorder = record(run, None, BaseLogger())
    recorder.begin_pipeline(_any(Controller(LONG, 0.25)))
    _steps(recorder, range(1, 5), 0.5, n_tokens=400)
    (tmp_path / "timelines").mkdir()
    for name in OF_THE_PLAN:
        (tmp_path / name).write_text("of the former pipeline")
    recorder.leave()
    recorder.begin_pipeline(_any(Controller(SHORT, 0.5)), ranks_per_replica=2)
    for part in recorder.parts:
        part.move(Move(5, 2, 2, run.n_replicas, "3 1", 1.5))
    _steps(recorder, range(5, 9), 0.25, n_tokens=200)
    recorder.end()
    return tmp_path


def _any(value: Any) -> Any:
    return value


def _steps(run: RunRecorder, steps: range, seconds: float, n_tokens: int) -> None:
    for step in steps:
        if step % 2 == 0:
            tags = run.log_step(step, 1.0 / step, grad_norm=1.0)
            n_replicas = 400 / n_tokens
            assert tags["freezing/elastic/ranks"] == run.run.controller.active_plan.order.n_ranks  # type: ignore[union-attr]
            assert tags["freezing/elastic/replicas"] == n_replicas
        run.end_step(step, seconds, n_tokens)


def test_rows_of_both_pipelines_follow_each_other(folder: Path) -> None:
    losses = LOSSES.read(folder)
    assert [(row.step, row.seconds) for row in losses] == [(2, 1.0), (4, 2.0), (6, 2.5), (8, 3.0)]
    steps = STEPS.read(folder)
    assert [row.step for row in steps] == list(range(1, 9))
    # 400 tokens of 4 devices in 0.5 s, then in 0.25 s.
    assert [row.tokens_per_second for row in steps] == [200.0] * 4 + [400.0] * 4


def test_the_summary_is_of_the_whole_run_and_its_speed_of_the_last_pipeline(folder: Path) -> None:
    summary = read_summary(folder)
    assert (summary.steps_done, summary.seconds) == (8, 3.0)
    assert (summary.step_ms, summary.tokens_per_second) == (250.0, 400.0)
    assert (summary.moves, summary.moves_seconds) == (1, 1.5)
    assert summary.average_freeze_ratio == 0.5
    assert summary.ranks_per_replica == 4


def test_the_move_is_written_and_told(folder: Path) -> None:
    assert MOVES.read(folder) == [Move(5, 2, 2, 2, "3 1", 1.5)]
    line = "2 layers frozen: 2 ranks with 3 1 layers, 2 replicas, in 1.5 s"
    report = (folder / "report.txt").read_text()
    assert f"  step 5                 {line}; a step 500.0 ms before, 250.0 ms since" in report
    page = (folder / "report.md").read_text()
    assert "| 5 | 2 | 2 | 2 | 3 1 | 1.5 | 500.0 ms | 250.0 ms |" in page


def test_files_of_the_former_pipeline_get_a_number(folder: Path) -> None:
    assert (folder / "schedule.csv").read_text() == order_to_csv(SHORT)
    assert (folder / "schedule_1.csv").read_text() == order_to_csv(LONG)
    assert (folder / "responses_1.csv").exists()
    assert RESPONSES.read(folder) == []
    for name in OF_THE_PLAN:
        former = (folder / name).with_stem(f"{Path(name).stem}_1")
        assert former.read_text() == "of the former pipeline"
        assert not (folder / name).exists()
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["training"]["steps"] == 8
    assert not (folder / "settings_1.json").exists()


def test_what_an_emulation_measured_by_its_own_clock_counts(tmp_path: Path) -> None:
    """Steps ran one action after the other."""
    virtual = {"emulated_ranks": 2, "kappa_error": 0.5, "virtual_step_ms": 95.0}
    emulation = SimpleNamespace(
        n_replicas=1, end_step=lambda phase, n_tokens: None, metrics=lambda: {"tag": 3.0},
        take_steps_ms=list, steps=StepLog(), collect=lambda: None,
        summarize=lambda freezes: virtual,
    )  # fmt: skip
    config = JobConfig()
    config.plots.enable = False
    config.emulation.enable = True
    put(config, "freezing", gradient_rank=0)
    run = run_in(tmp_path, START, config=config, device=torch.device("cpu"))
    recorder = record(run, None, BaseLogger())
    recorder.begin_pipeline(_any(Controller(LONG, 0.25)), _any(emulation))
    assert recorder.log_step(1, 2.0, grad_norm=1.0)["tag"] == 3.0
    for step in range(1, 9):
        recorder.end_step(step, 0.5, n_tokens=400)
    recorder.end(device_seconds=10.0)
    summary = read_summary(tmp_path)
    assert (summary.step_ms, summary.virtual_step_ms, summary.kappa_error) == (500.0, 95.0, 0.5)
    assert (summary.emulated_ranks, summary.device_seconds) == (2, None)


@pytest.mark.parametrize("world_size", [2, 4, 6, 8, 12, 16, 64])
def test_what_had_the_loss_first_has_it_in_each_shorter_pipeline(world_size: int) -> None:
    """Processes are numbered stage by stage, replicas within each."""
    pipelines = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for first in pipelines:
        dims = ParallelDims(1, world_size // first, 1, 1, first, 1, 1, world_size)
        shown = titan_metrics._get_metrics_rank(dims, JobConfig())
        for later in (n for n in pipelines if n <= first):
            of_stage = torch.arange(world_size).reshape(later, -1)
            assert shown in of_stage[-1]


@pytest.mark.parametrize("fault", ["takes no files", "was deleted"])
def test_a_folder_that_fails_ends_no_training(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, own = tmp_path / "former", tmp_path / "own"
    for folder in (former, own):
        folder.mkdir()
    LOSSES.write(former, [LossRow(step, float(step), 1.0 / step, None) for step in range(1, 9)])
    config = JobConfig()
    put(config, "freezing", method="fixed", gradient_rank=0)
    config.plots.enable = False
    config.report.reference_run = str(former)
    run = run_in(own, START, config=config, n_layers=None, device=torch.device("cpu"))
    recorder = record(run, None, BaseLogger())
    controller = Controller(SHORT, 0.25)
    controller.subspaces, controller.active_plan.dag = SimpleNamespace(dimension=0), DAG
    recorder.begin_pipeline(_any(controller))
    for name in ("bounds.json", "plan.json"):
        (own / name).write_text("of the former plan")
    recorder.end_step(1, 0.5, 400)
    if fault == "takes no files":

        def refused(*_: Any) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        for name in ("rename", "replace", "open", "mkdir"):
            monkeypatch.setattr(os, name, refused)
    bounds = uniform_bounds(DAG, forward_ms=1.0, backward_ms=(1.0, 2.0))
    plan = plan_from_ratios(DAG, bounds, np.zeros(len(DAG.actions)))
    recorder.tell(RunPart.begin_plan, plan, bounds, n_processors=None, sizes=lambda: None)
    recorder.log_step(2, 0.5, 1.0)
    if fault == "was deleted":
        shutil.rmtree(own)
    recorder.end_step(2, 0.5, 400)
    recorder.end()
    recorder.close()
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert sum("training goes on" in each for each in warned) == 1
    is_told = any("report.reference_run is not compared with" in each for each in warned)
    assert is_told == (fault == "was deleted") == (own / "report.txt").exists()
