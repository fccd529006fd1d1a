"""Questions from local files, put where lm-eval would read a data set of the hub.

lm-eval's tasks are loaded by name and stay as they are: prompts, examples, metrics. Only the call
that fetches a data set is answered from here, so nothing but the source can differ.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets

ENDINGS = (".jsonl", ".jsonl.gz")
FIELDS = {
    "mmlu": ("question", "choices", "answer", "subject"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "arc_challenge": ("question", "choices", "answerKey"),
    "truthfulqa_mc": ("question", "mc1_targets", "mc2_targets"),
}


@dataclass(frozen=True)
class Source:
    """What files stand for a data set of the hub.

    Attributes:
        files: First part of the files' names.
        asked: Split that lm-eval asks questions from.
        examples: Splits that lm-eval takes solved examples from, or loads for that.
        config: The data set's configuration; None where each stands for a subject.
    """

    files: str
    asked: str
    examples: tuple[str, ...] = ()
    config: str | None = None


# By the name that lm-eval's tasks have for the data set.
SOURCES = {
    "cais/mmlu": Source("mmlu", "test", ("dev",)),
    "Rowan/hellaswag": Source("hellaswag", "validation", ("train",)),
    "allenai/ai2_arc": Source("arc_challenge", "test", ("train",), "ARC-Challenge"),
    "truthfulqa/truthful_qa": Source("truthfulqa_mc", "validation", (), "multiple_choice"),
}
OF_BENCHMARK = {
    "mmlu": "cais/mmlu",
    "hellaswag": "Rowan/hellaswag",
    "arc_challenge": "allenai/ai2_arc",
    "truthfulqa_mc1": "truthfulqa/truthful_qa",
    "truthfulqa_mc2": "truthfulqa/truthful_qa",
}
# Needed by name, but never drawn from: HellaSwag is asked without examples.
UNUSED = {("Rowan/hellaswag", "train")}


@dataclass(frozen=True)
class LocalQuestions:
    """The files of a folder that hold benchmarks, ``<name>_<split>.jsonl`` or ``.jsonl.gz``.

    Where a benchmark has no file of the split that lm-eval asks from, its validation rows are
    asked instead.
    """

    folder: Path
    _rows: dict[Path, list[dict[str, Any]]] = field(default_factory=dict, repr=False)

    def file(self, benchmark: str) -> Path:
        """Return the file whose rows are asked.

        Raises:
            ValueError: If there is none.
        """
        source = SOURCES[OF_BENCHMARK[benchmark]]
        return self._find(source.files, dict.fromkeys([source.asked, "validation"]))

    def errors(self, benchmarks: Sequence[str]) -> list[str]:
        """Return what is missing in the folder, a line for each file."""
        if not self.folder.is_dir():
            return [f"--data-dir is {str(self.folder)!r}, which is not a folder"]
        found = []
        for benchmark in benchmarks:
            name = OF_BENCHMARK[benchmark]
            source = SOURCES[name]
            needed = [
                dict.fromkeys([source.asked, "validation"]),
                *([split] for split in source.examples if (name, split) not in UNUSED),
            ]
            for splits in needed:
                try:
                    self._find(source.files, splits)
                except ValueError as error:
                    found.append(str(error))
        return list(dict.fromkeys(found))

    def load(self, path: str, name: str | None = None, **_options: Any) -> datasets.DatasetDict:
        """Answer ``datasets.load_dataset`` for the data sets of the benchmarks.

        Args:
            path: Name of the data set on the hub.
            name: Its configuration; for MMLU the subject.

        Raises:
            ValueError: If lm-eval asks for something else, or a file is missing or broken.
        """
        source = SOURCES.get(path)
        if source is None or (source.config is not None and name != source.config):
            raise ValueError(
                f"lm-eval asks for the data set {path!r} ({name}), of which --data-dir knows no "
                f"files; known: {', '.join(SOURCES)}"
            )
        asked = self._find(source.files, dict.fromkeys([source.asked, "validation"]))
        splits = {source.asked: self._select(asked, source, name)}
        for split in source.examples:
            if (path, split) in UNUSED:
                # Empty, so that nothing can be drawn from the questions themselves.
                splits[split] = splits[source.asked].select([])
            else:
                splits[split] = self._select(self._find(source.files, [split]), source, name)
        return datasets.DatasetDict(splits)

    def _select(self, path: Path, source: Source, name: str | None) -> datasets.Dataset:
        """Return the rows of ``path``; of MMLU those of one subject, in the order of the file."""
        rows = self._read(path, FIELDS[source.files])
        if source.files == "mmlu":
            rows = [row for row in rows if row["subject"] == name]
            if not rows:
                raise ValueError(f"{path} has no rows of the subject {name!r}")
        return datasets.Dataset.from_list(rows)

    def _read(self, path: Path, needed: Sequence[str]) -> list[dict[str, Any]]:
        if path not in self._rows:
            self._rows[path] = list(_read_rows(path, needed))
        return self._rows[path]

    def _find(self, files: str, splits: Mapping[str, None] | Sequence[str]) -> Path:
        names = [f"{files}_{split}{ending}" for split in splits for ending in ENDINGS]
        for name in names:
            if (self.folder / name).is_file():
                return self.folder / name
        raise ValueError(f"{self.folder} has none of {', '.join(names)}")


@contextmanager
def questions_from(local: LocalQuestions) -> Iterator[None]:
    """Answer ``datasets.load_dataset`` from ``local`` while in this context."""
    original = datasets.load_dataset
    datasets.load_dataset = local.load
    try:
        yield
    finally:
        datasets.load_dataset = original


def _read_rows(path: Path, needed: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON lines.

    Raises:
        ValueError: If a line is no object or lacks a field; the line is named.
    """
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is {type(row).__name__}, not an object")
            if missing := [name for name in needed if name not in row]:
                raise ValueError(f"{path}, line {number} lacks {', '.join(missing)}")
            yield row
