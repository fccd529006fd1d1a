"""Questions from local files, as task files for lm-eval's ``--include_path``.

A task file includes lm-eval's own and changes where examples are read, nothing else, so prompts
and metrics are lm-eval's. The examples are read and written anew because lm-eval tells of broken
ones without file or line, and has a task for each subject of MMLU, which one file holds.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from timelyfreeze.files import listed, shown
from timelyfreeze.records import BY_KEY

ENDINGS = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Source:
    """Which files hold a benchmark.

    Attributes:
        files: First part of their names; the rest is the split.
        fields: What each line has.
        tasks: lm-eval's task files, below its folder of tasks; several for MMLU alone.
        shots: Split that solved examples are taken from, if any are shown.
        changes: Further keys of the task that have to change.
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
    """Return the files of tasks, by the split that each stands for, the one asked first.

    Where there is no file of the split that lm-eval asks from, the validation split is asked.

    Args:
        folder: With ``<name>_<split>.jsonl`` or ``.jsonl.gz``.
        tasks: Keys of benchmarks.

    Raises:
        ValueError: If files are missing, all of which are named, or a task is another one.
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
    """Write task files that ask the local questions of a benchmark.

    Args:
        files: See :func:`find_files`.
        task: Key of the benchmark.
        folder: An empty one, for ``--include_path``.

    Raises:
        ValueError: If a file is broken, or MMLU lacks a subject.
    """
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
    """Return lm-eval's folder of tasks, without the seconds that importing it takes.

    Raises:
        ValueError: If lm-eval is not installed.
    """
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise ValueError("lm-eval is not installed: pip install 'timelyfreeze[eval]'")
    return Path(spec.origin).parent / "tasks"


def _read_lines(path: Path, needed: Iterable[str]) -> Iterator[dict[str, Any]]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                example = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
            if not isinstance(example, dict):
                kind = type(example).__name__
                raise ValueError(f"{path}, line {number} is {kind}, not an object")
            if missing := [name for name in needed if name not in example]:
                raise ValueError(f"{path}, line {number} lacks {listed(missing)}")
            yield example
