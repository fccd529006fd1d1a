#!/usr/bin/env python3
"""Scores a model on the benchmarks of the paper, with lm-eval's prompts and metrics.

    scripts/evaluate.sh RUN_OR_FOLDER [--step N] [--data-dir FOLDER] [--limit N] [...]

MMLU with 5 examples, HellaSwag with none, ARC-Challenge with 10, TruthfulQA multiple choice with
none. The table is printed. The scores go to scores.json in the run's folder, from where
compare_methods.py takes them, and to the run's TensorBoard; for a Hugging Face folder to that
folder, or to --output. What is there is replaced.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Protocol

from timelyfreeze.files import listed, shown
from timelyfreeze.files.options import require
from timelyfreeze.records import (
    AVERAGED,
    BENCHMARKS,
    BY_KEY,
    HUB,
    SCORES,
    Benchmark,
    Score,
    Scores,
    render_scores,
    scores_to_json,
)
from torchtitan.evaluation.model import Model, Runner, find_model, run_command

DTYPES = ("float32", "bfloat16", "float16")
_BATCH_SIZE = re.compile(r"auto(:[1-9][0-9]{0,8})?|[1-9][0-9]{0,8}")


class Scorer(Protocol):
    """A loaded model that can be asked."""

    dtype: str
    device: str

    def score(self, benchmark: Benchmark) -> Score:
        """Ask the questions of a benchmark."""


@dataclass(frozen=True)
class Settings:
    """What was asked for on the command line.

    Attributes:
        benchmarks: Which, in the order of the table.
        data_dir: Folder of local questions; None for the hub.
        limit: Questions of each benchmark; None for all.
        device: None for the first GPU, or the CPU where there is none.
        dtype: None for what suits the device.
        batch_size: None for what suits the device.
    """

    benchmarks: tuple[Benchmark, ...] = BENCHMARKS
    data_dir: Path | None = None
    limit: int | None = None
    device: str | None = None
    dtype: str | None = None
    batch_size: str | None = None


Opener = Callable[[Path, Settings], tuple[Scorer, dict[str, str]]]


def open_with_lm_eval(folder: Path, settings: Settings) -> tuple[Scorer, dict[str, str]]:
    """Load the model in ``folder``, and return it with the versions that its scores depend on."""
    from torchtitan.evaluation.harness import load_harness, versions
    from torchtitan.evaluation.questions import LocalQuestions

    harness = load_harness(
        folder,
        local=None if settings.data_dir is None else LocalQuestions(settings.data_dir),
        limit=settings.limit,
        device=settings.device,
        dtype=settings.dtype,
        batch_size=settings.batch_size,
    )
    return harness, versions()


def main(
    arguments: Sequence[str],
    *,
    opener: Opener = open_with_lm_eval,
    runner: Runner = run_command,
) -> int:
    """Score a model, and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        settings = _settings(options)
        model = find_model(options.model, options.step, runner)
        output = _output(options.output or model.run or model.folder)
        scores = evaluate(model, settings, output, opener)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if model.run is not None:
        write_tensorboard(model.run, scores)
    print(f"\n{render_scores(scores)}\n{output / SCORES}")
    return 0


def evaluate(model: Model, settings: Settings, output: Path, opener: Opener) -> Scores:
    """Score a model, and keep what is known after each benchmark.

    Raises:
        ValueError: If questions are missing or broken.
    """
    scorer, versions = opener(model.folder, settings)
    scores = Scores(
        model=str(model.folder),
        step=model.step,
        source=HUB if settings.data_dir is None else str(settings.data_dir),
        limit=settings.limit,
        dtype=scorer.dtype,
        device=scorer.device,
        versions=versions,
        evaluated_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        benchmarks={},
    )
    for benchmark in settings.benchmarks:
        score = scorer.score(benchmark)
        scores = replace(scores, benchmarks={**scores.benchmarks, benchmark.key: score})
        (output / SCORES).write_text(scores_to_json(scores))
    return scores


def write_tensorboard(run: Path, scores: Scores) -> None:
    """Add the scores, in percent, to the TensorBoard files of a run."""
    from torch.utils.tensorboard import SummaryWriter

    metrics = {key: score.accuracy for key, score in scores.benchmarks.items()}
    if scores.average is not None:
        metrics["average"] = scores.average
    with SummaryWriter(str(run)) as writer:
        for key, accuracy in metrics.items():
            writer.add_scalar(f"accuracy(%)/{key}", 100 * accuracy, scores.step)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/evaluate.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, metavar="RUN_OR_FOLDER", help="a run, or a Hugging Face folder")
    add("--step", type=int, help="checkpoint of the run (default: the last)")
    add("--data-dir", type=Path, metavar="FOLDER", help="local questions instead of the hub's")
    add("--limit", type=int, metavar="N", help="the first N questions of each benchmark")
    add(
        "--benchmarks",
        nargs="+",
        metavar="NAME",
        default=list(BY_KEY),
        help=f"some of: {', '.join(BY_KEY)} (default: all)",
    )
    add("--output", type=Path, metavar="FOLDER", help=f"where {SCORES} goes")
    add("--device", help="such as cuda:1 (default: the first GPU, or the CPU)")
    add("--dtype", help="such as float32 (default: bfloat16 on a GPU, float32 on a CPU)")
    add("--batch-size", help="a number or auto (default: auto on a GPU, 8 on a CPU)")
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    for name in ("limit", "step"):
        if getattr(options, name) is not None:
            require(f"--{name}", getattr(options, name), 1, 1e9)
    if options.batch_size is not None and not _BATCH_SIZE.fullmatch(options.batch_size):
        raise ValueError(
            f"--batch-size is {shown(options.batch_size)}; it must be auto, or a number, 1 or more"
        )
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ValueError(f"--dtype is {shown(options.dtype)}; known: {', '.join(DTYPES)}")
    if options.device is not None:
        _check_device(options.device)
    if unknown := [name for name in options.benchmarks if name not in BY_KEY]:
        raise ValueError(f"--benchmarks has {listed(unknown)}; known: {', '.join(BY_KEY)}")
    if missing := [name for name in AVERAGED if name not in options.benchmarks]:
        print(f"No average: {', '.join(missing)} left out", file=sys.stderr)
    benchmarks = tuple(benchmark for benchmark in BENCHMARKS if benchmark.key in options.benchmarks)
    if options.data_dir is not None:
        _check_questions(options.data_dir, benchmarks)
    return Settings(
        benchmarks,
        options.data_dir,
        options.limit,
        options.device,
        options.dtype,
        options.batch_size,
    )


def _check_device(name: str) -> None:
    """Raise where there is no such device: the model would be put on another one, or nowhere."""
    if name == "cpu":
        return
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number.isdecimal() or name == "cuda") or len(number) > 4:
        raise ValueError(f"--device is {shown(name)}; it must be cpu, cuda, or cuda:1 and the like")
    # Imported late: --help need not wait for torch.
    import torch

    if int(number or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device is {name}; {torch.cuda.device_count()} GPUs are visible")


def _check_questions(folder: Path, benchmarks: Sequence[Benchmark]) -> None:
    """Raise if files are missing, before a model is exported or loaded."""
    if not os.path.isdir(folder):
        raise ValueError(f"--data-dir is {shown(str(folder))}, which is no folder")
    # Read when the libraries are imported, which is next: nothing is to be looked for on the hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from torchtitan.evaluation.questions import LocalQuestions

    errors = LocalQuestions(folder).errors([benchmark.key for benchmark in benchmarks])
    if errors:
        raise ValueError("\n       ".join(errors))


def _output(folder: Path) -> Path:
    """Return ``folder``, made if need be; fails now rather than after hours of questions."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output is {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} cannot be written to; name another folder with --output")
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
