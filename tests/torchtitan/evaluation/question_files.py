"""A folder of questions, made up here, in the layout that evaluate.sh --data-dir reads."""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SUBJECTS = ("anatomy", "virology")


def mmlu_row(subject: str, split: str, number: int) -> dict[str, Any]:
    return {
        "question": f" What is part {number} of {subject} ({split})? ",
        "choices": [f"{subject} {letter}{number}" for letter in "pqrs"],
        "answer": number % 4,
        "subject": subject,
        "split": split,
    }


def hellaswag_row(number: int) -> dict[str, Any]:
    ctx_a, ctx_b = f"A man [header] holds {number} balls.", "he"
    return {
        "ind": number,
        "activity_label": "Juggling",
        "ctx_a": ctx_a,
        "ctx_b": ctx_b,
        "ctx": f"{ctx_a} {ctx_b}",
        "endings": [f"throws  {n} of {number}. [step] Then he rests." for n in range(4)],
        "source_id": f"made up {number}",
        "split": "val",
        "split_type": "indomain",
        "label": str(number % 4),
    }


def arc_row(split: str, number: int) -> dict[str, Any]:
    return {
        "id": f"{split}_{number}",
        "question": f"Which stone of {split} {number} is heaviest?",
        "choices": {"text": [f"stone {n} of {number}" for n in range(4)], "label": list("ABCD")},
        "answerKey": "ABCD"[number % 4],
    }


def truthfulqa_row(number: int) -> dict[str, Any]:
    return {
        "question": f"How many legs has animal {number}?",
        "mc1_targets": {"choices": [f"{number} legs.", "None.", "Nine."], "labels": [1, 0, 0]},
        "mc2_targets": {
            "choices": [f"{number} legs.", "It has legs.", "Nine.", "None."],
            "labels": [1, 1, 0, 0],
        },
    }


def write_questions(
    folder: Path, *, subjects: Iterable[str] = SUBJECTS, n_asked: int = 3, n_examples: int = 12
) -> Path:
    """Write all files; a benchmark has ``n_asked`` questions, MMLU as many of each subject."""
    subjects = list(subjects)
    rows = {
        "mmlu_dev.jsonl": [mmlu_row(s, "dev", n) for n in range(n_examples) for s in subjects],
        "mmlu_validation.jsonl": [
            mmlu_row(s, "validation", n) for n in range(n_asked) for s in subjects
        ],
        "hellaswag_validation.jsonl.gz": [hellaswag_row(n) for n in range(n_asked)],
        "arc_challenge_train.jsonl": [arc_row("train", n) for n in range(n_examples)],
        "arc_challenge_validation.jsonl": [arc_row("validation", n) for n in range(n_asked)],
        "truthfulqa_mc_validation.jsonl": [truthfulqa_row(n) for n in range(n_asked)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, of_file in rows.items():
        write_rows(folder / name, of_file)
    return folder


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines, packed if its name ends in .gz."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8") as file:
        file.write(text)
