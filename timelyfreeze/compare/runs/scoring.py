"""Scores of the runs of a comparison, and of the model before training, by ``evaluate``.

A process of its own scores a run, with a log beside the training's. Scores go to the run's folder,
for the model before training to ``base_model`` in the output.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from timelyfreeze.cli import run_environment
from timelyfreeze.compare.runs.jobs import Job, Settings, Starter, print_end, start
from timelyfreeze.compare.runs.run import BASE_MODEL, Run, find_runs, finished_run
from timelyfreeze.records.scores import BY_KEY, HUB, Scores, read_scores

LOG = "evaluate.log"
_HARNESS = "lm_eval"


@dataclass(frozen=True)
class Questions:
    """The questions asked of all models."""

    told: argparse.Namespace  # tasks, data_dir (absolute), limit and dtype; None for the default
    options: tuple[str, ...]  # further ones of ``timelyfreeze evaluate``
    further: tuple[str, ...]  # options of lm-eval, those after ``--``

    def arguments(self, model: Path, output: Path) -> list[str]:
        """Return the arguments of ``evaluate`` to score a model into the folder ``output``."""
        words = [str(model), *self.options]
        for name in ("tasks", "data_dir", "limit", "dtype"):
            if (value := getattr(self.told, name)) is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        return [*words, "--output", str(output), *(["--", *self.further] if self.further else [])]

    def are_answered_in(self, scores: Scores) -> bool:
        """Tell whether these questions, all of them and no others, have given the scores."""
        told, tasks = self.told, self.told.tasks.split(",") if self.told.tasks else BY_KEY
        own = told.data_dir or HUB, told.limit, shlex.join(self.further), told.dtype or scores.dtype
        asked = scores.source, scores.limit, scores.options, scores.dtype
        return own == asked and set(tasks) == set(scores.tasks.split(","))


def parse_questions(text: str) -> Questions:
    """Read the options of ``evaluate``, given as a text."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"--evaluate is {text!r}: {error}") from None
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="--evaluate", add_help=False, allow_abbrev=False)
    for name in ("--tasks", "--data-dir", "--dtype", "--output", "--step"):
        parser.add_argument(name)
    parser.add_argument("--limit", type=int)
    known, others = parser.parse_known_args(words[:split])
    if known.output is not None:
        raise ValueError("--evaluate has --output; scores go to each run's folder, leave it out")
    if known.step is not None:
        raise ValueError("--evaluate has --step; the last checkpoint is scored, leave it out")
    if known.data_dir is not None:
        folder = Path(known.data_dir).resolve()
        if not folder.is_dir():
            raise ValueError(f"--evaluate has --data-dir {known.data_dir}, which is no folder")
        known.data_dir = str(folder)  # the process starts elsewhere
    return Questions(known, tuple(others), tuple(words[split + 1 :]))


def scoring_errors(settings: Settings) -> Iterator[str]:
    """Yield why runs of these settings could not be scored."""
    if find_spec(_HARNESS) is None:
        yield "--evaluate needs lm-eval, which is not installed: pip install 'timelyfreeze[eval]'"
    if settings.config.is_file() and not settings.is_on("checkpoint.enable"):
        yield "--evaluate scores checkpoints; set checkpoint.enable in CONFIG"


@dataclass(frozen=True)
class Scoring:
    """Scores models below ``output``, and skips scored models."""

    questions: Questions
    output: Path
    starter: Starter = start

    def score(self, job: Job) -> bool:
        """Score a job's finished run; return whether scores are there now."""
        folder = self.output / job.path
        run = finished_run(folder)
        assert run is not None  # run_jobs gives none that is not finished
        return self._score(run.folder, run.folder, folder / LOG, step=run.summary.steps)

    def score_base_model(self) -> bool:
        """Score the model before training; return False for a failure."""
        runs = [run for run in find_runs([self.output]).runs if run.is_finished]
        if not runs:
            return True
        began = {_base_model(run) for run in runs}
        print("The model before training: ", end="")
        if len(began) > 1 or None in began:
            names = sorted(str(name or "none that is a Hugging Face folder") for name in began)
            print(f"not scored, runs began with {', '.join(names)}", flush=True)
            return True
        (model,) = (name for name in began if name is not None)
        place = self.output / BASE_MODEL
        place.mkdir(exist_ok=True)
        print(model, flush=True)
        return self._score(model, place, place / LOG, step=None)

    def _score(self, model: Path, place: Path, log: Path, *, step: int | None) -> bool:
        """Score a model unless ``place`` has its scores; print progress."""
        if self._known(place, step) is not None:
            return True
        print("  scores: ...", end="", flush=True)
        started = time.monotonic()
        words = self.questions.arguments(model, place)
        command = [sys.executable, "-m", "timelyfreeze", "evaluate", *words]
        status = self.starter(command, run_environment(os.environ, 1), log)
        took = tqdm.format_interval(time.monotonic() - started)
        scores = self._known(place, step) if status == 0 else None
        if scores is not None:
            average = "" if scores.average is None else f" {100 * scores.average:.2f}% on average,"
            print(f"{average} {took}", flush=True)
            return True
        reason = f"exit status {status}" if status else f"no scores of all questions in {place}"
        print(f" failed after {took} ({reason})")
        print_end(log)
        return False

    def _known(self, place: Path, step: int | None) -> Scores | None:
        """Return the scores in ``place`` if they are of this step and these questions."""
        try:
            scores = read_scores(place)
        except ValueError:
            return None  # broken: evaluate writes them again
        if scores is None or scores.step != step:
            return None
        return scores if self.questions.are_answered_in(scores) else None


def _base_model(run: Run) -> Path | None:
    """Return the Hugging Face folder of a run's first weights; None without."""
    if not run.settings.get("checkpoint.initial_load_in_hf"):
        return None
    named = run.settings.get("checkpoint.initial_load_path")
    folder = named or run.settings.get("model.hf_assets_path")
    return Path(folder) if folder else None
