"""lm-eval's own command line: its arguments and results."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from timelyfreeze.files import listed, shown
from timelyfreeze.records.scores import BY_KEY, Benchmark, Score

# lm-eval's name of a metric ends in the filter that answers went through.
FILTER = "none"
# Runs lm-eval with arguments and additions to the environment; ValueError if it fails.
Runner = Callable[[Sequence[str], Mapping[str, str]], None]


def run_lm_eval(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run ``python -m lm_eval``, ended with this process; ValueError if it fails."""
    lm_eval_tasks()
    command = [sys.executable, "-m", "lm_eval", *arguments]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        status = subprocess.run(
            command, env={**os.environ, **environment}, check=False, preexec_fn=_ignore_interrupts
        ).returncode
    finally:
        signal.signal(signal.SIGTERM, before)
    if status != 0:
        raise ValueError(f"{' '.join(command)} ended with status {status}")


def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent process, which ends this one without a stack trace."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def ask(
    arguments: Mapping[str, object],
    further: Sequence[str],
    results: Path,
    runner: Runner,
    local: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Ask a model a task's questions, the hub's or ``local`` ones, and return lm-eval's results."""
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
    """Have lm-eval refuse unknown ``tasks``; patterns and files are not checked."""
    names = [task for task in tasks if not re.search(r"[*?\[]|\.yaml$", task)]
    if names:
        pairs = pairwise(further)
        places = [word for pair in pairs if pair[0] == "--include_path" for word in pair]
        runner(["validate", "--tasks", ",".join(names), *places], {})


def read_score(results: Mapping[str, Any], benchmark: Benchmark, questions: str) -> Score:
    """Return a benchmark's score from lm-eval's ``results``; ValueError without its metric."""
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
    """Return all numbers of lm-eval's ``results`` by task and metric; of a group its own alone."""
    found = {name: _numbers(metrics) for name, metrics in results["results"].items()}
    own = {task: found[task]} if found.get(task) else found
    return {name: metrics for name, metrics in own.items() if metrics}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the computed metrics: lm-eval has texts, counts and NaN among them."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if "," in name and isinstance(value, int | float) and math.isfinite(value)
    }


ENDINGS = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Source:
    """Files of a benchmark: the first part of their names; the rest is the split.

    ``fields`` are the keys of a line. ``tasks`` are lm-eval's task files, several for MMLU alone.
    Solved examples are taken from the split ``shots``. ``changes`` are further keys of the task.
    """

    files: str
    fields: tuple[str, ...]
    tasks: str
    shots: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


_MMLU = ("question", "choices", "answer", "subject")
_HELLASWAG = ("activity_label", "ctx_a", "ctx_b", "endings", "label")
_ARC = ("question", "choices", "answerKey")
_TRUTH = ("truthfulqa_mc", ("question", "mc1_targets", "mc2_targets"))
SOURCES = {
    "mmlu": Source("mmlu", _MMLU, "mmlu/default/mmlu_*.yaml", "dev"),
    # Nothing is drawn from HellaSwag's training split, as it is asked without examples.
    "hellaswag": Source(
        "hellaswag", _HELLASWAG, "hellaswag/hellaswag.yaml", changes={"training_split": None}
    ),
    "arc_challenge": Source("arc_challenge", _ARC, "arc/arc_challenge.yaml", "train"),
    "truthfulqa_mc1": Source(*_TRUTH, "truthfulqa/truthfulqa_mc1.yaml"),
    "truthfulqa_mc2": Source(*_TRUTH, "truthfulqa/truthfulqa_mc2.yaml"),
}


def find_files(folder: Path, tasks: Iterable[str]) -> dict[str, dict[str, Path]]:
    """Return the files of tasks by split, the asked split first.

    Names are ``<name>_<split>.jsonl`` or ``.jsonl.gz``. Without lm-eval's split for questions the
    validation split is taken. ValueError names all missing files.
    """
    if not os.path.isdir(folder):
        raise ValueError(f"--data-dir is {shown(str(folder))}, which is not a folder")
    found: dict[str, dict[str, Path]] = {}
    missing = []
    for task in tasks:
        if task not in SOURCES:
            raise ValueError(
                f"--data-dir knows no files for {shown(task)}; known: {', '.join(SOURCES)}. "
                "For others write task files of lm-eval, and name them after -- --include_path"
            )
        source, asked, found[task] = SOURCES[task], BY_KEY[task].split, {}
        wanted = {asked: dict.fromkeys([asked, "validation"])}
        if source.shots:
            wanted[source.shots] = {source.shots: None}
        for split, places in wanted.items():
            names = [f"{source.files}_{place}{ending}" for place in places for ending in ENDINGS]
            there = [folder / name for name in names if (folder / name).is_file()]
            if there:
                found[task][split] = there[0]
            else:
                missing.append(f"{folder} has none of {', '.join(names)}")
    if missing:
        raise ValueError("\n       ".join(dict.fromkeys(missing)))
    return found


def write_tasks(files: Mapping[str, Path], task: str, folder: Path) -> None:
    """Write task files, for ``--include_path``, with the local questions of a benchmark."""
    source = SOURCES[task]
    examples = {split: list(_read_lines(path, source.fields)) for split, path in files.items()}
    for original in sorted(lm_eval_tasks().glob(source.tasks)):
        data_files = {}
        for split, of_split in examples.items():
            if task == "mmlu":
                subject = original.stem.removeprefix("mmlu_")
                of_split = [one for one in of_split if one["subject"] == subject]
                if not of_split:
                    raise ValueError(f"{files[split]} has nothing of the subject {subject!r}")
            file = folder / f"{original.stem}_{split}.jsonl"
            file.write_text("".join(json.dumps(one) + "\n" for one in of_split))
            data_files[split] = str(file)
        place = {"dataset_name": None, "dataset_kwargs": {"data_files": data_files}}
        changed = {"include": str(original), "dataset_path": "json", **place, **source.changes}
        # JSON is YAML.
        (folder / original.name).write_text(json.dumps(changed, indent=2))


def lm_eval_tasks() -> Path:
    """Return lm-eval's folder of tasks, without its import, which takes seconds."""
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise ValueError("lm-eval is not installed: pip install 'timelyfreeze[eval]'")
    return Path(spec.origin).parent / "tasks"


def _read_lines(path: Path, needed: Sequence[str]) -> Iterator[dict[str, Any]]:
    # Imported late: --help need not wait for torch.
    from torchtitan.data.rows.errors import DataExampleError, kind_of
    from torchtitan.data.rows.examples import read_rows

    for number, row in read_rows(path):
        known = row if isinstance(row, dict) else {}
        if missing := [name for name in needed if name not in known]:
            problem = f"is {kind_of(row)} without {listed(missing)}"
            raise DataExampleError(str(path), number, problem)
        yield row
