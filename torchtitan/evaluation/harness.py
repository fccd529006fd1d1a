"""lm-eval's own command line: what it is given, and what its results say."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from timelyfreeze.records import Benchmark, Score
from torchtitan.evaluation.questions import lm_eval_tasks, write_tasks

# lm-eval's name of a metric ends in the filter that answers went through.
FILTER = "none"
# Runs lm-eval with arguments and additions to the environment; ValueError if it fails.
Runner = Callable[[Sequence[str], Mapping[str, str]], None]


def run_lm_eval(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run ``python -m lm_eval``; its messages go to the terminal.

    It ends when this process is told to end.

    Raises:
        ValueError: If it is not installed, or fails.
    """
    lm_eval_tasks()
    command = [sys.executable, "-m", "lm_eval", *arguments]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        status = subprocess.run(command, env={**os.environ, **environment}, check=False).returncode
    finally:
        signal.signal(signal.SIGTERM, before)
    if status != 0:
        raise ValueError(f"{' '.join(command)} ended with status {status}")


def ask(
    arguments: Mapping[str, object],
    further: Sequence[str],
    results: Path,
    runner: Runner,
    local: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Ask a model the questions of one task, and return the results that lm-eval has written.

    Args:
        arguments: Options of lm-eval and their values; those with None are left out.
        further: More of them, as they are.
        results: Folder for lm-eval's files; replaced.
        runner: Runs lm-eval.
        local: Files of questions by their split; None for the hub.

    Raises:
        ValueError: If questions are broken, lm-eval fails, or it has written no results.
    """
    shutil.rmtree(results, ignore_errors=True)
    given = {**arguments, "--output_path": results}
    environment = {"TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "false")}
    with TemporaryDirectory() as folder:
        if local is not None:
            write_tasks(local, str(arguments["--tasks"]), Path(folder))
            given["--include_path"] = folder
            environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": f"{folder}/cache"}
        words = [word for name, value in given.items() if value is not None
                 for word in (name, str(value))]  # fmt: skip
        runner(["run", *words, *further], environment)
    written = sorted(results.rglob("results_*.json"))
    if not written:  # lm-eval only logs that it could not write them
        raise ValueError(f"lm-eval has written no results_*.json below {results}")
    return dict(json.loads(written[-1].read_text()))


def check_tasks(tasks: Sequence[str], further: Sequence[str], runner: Runner) -> None:
    """Have lm-eval say which of ``tasks`` it does not know; patterns and files are not checked.

    Raises:
        ValueError: If there are some.
    """
    names = [task for task in tasks if not re.search(r"[*?\[]|\.yaml$", task)]
    if names:
        pairs = pairwise(further)
        places = [word for pair in pairs if pair[0] == "--include_path" for word in pair]
        runner(["validate", "--tasks", ",".join(names), *places], {})


def read_score(results: Mapping[str, Any], benchmark: Benchmark, questions: str) -> Score:
    """Return what lm-eval's ``results`` of one benchmark say.

    Raises:
        ValueError: If the metric that is wanted is not among them.
    """
    metrics = _numbers(results["results"][benchmark.task])
    name = f"{benchmark.metric},{FILTER}"
    if name not in metrics:
        raise ValueError(f"lm-eval gives no {name!r} for {benchmark.task}; it gives {[*metrics]}")
    return Score(
        accuracy=metrics.pop(name),
        stderr=metrics.pop(f"{benchmark.metric}_stderr,{FILTER}", None),
        n_questions=sum(counts["effective"] for counts in results["n-samples"].values()),
        questions=questions,
        n_shots=max(results["n-shot"].values()),
        metric=f"{benchmark.task} {benchmark.metric}",
        others={
            key.removesuffix(f",{FILTER}"): value
            for key, value in metrics.items()
            if key.endswith(f",{FILTER}") and "_stderr" not in key
        },
    )


def read_metrics(results: Mapping[str, Any], task: str) -> dict[str, dict[str, float]]:
    """Return all numbers of lm-eval's ``results`` by task and metric, as lm-eval names them.

    Of a group that has metrics of its own, those alone.
    """
    found = {name: _numbers(metrics) for name, metrics in results["results"].items()}
    own = {task: found[task]} if found.get(task) else found
    return {name: metrics for name, metrics in own.items() if metrics}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return what is a metric and was computed: lm-eval has texts, counts and NaN among them."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if "," in name and isinstance(value, int | float) and math.isfinite(value)
    }
