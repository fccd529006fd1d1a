#!/usr/bin/env python3
"""Sets planned batches beside the paper's measured ones: a markdown table.

    python benchmarks/paper_table.py Llama-3-8B PLAN.json [PLAN.json ...]

PLAN.json is what ``timelyfreeze plan ... --json PLAN.json`` writes, from a profile of the
paper's run (``train_configs/``). Splits other than the default are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from timelyfreeze.files import markdown_table, number_of, parse_json, shown
from timelyfreeze.files.options import status_of
from timelyfreeze.settings import AUTO

DEFAULT_SPLIT = "default"
# A batch of the paper's language models: 16 examples of 1024 tokens over 4 devices (Table 3).
TOKENS_PER_DEVICE = 16 * 1024 / 4


class PaperRow(NamedTuple):
    """What the paper measured of a model under one schedule, r_max 0.8.

    Attributes:
        tokens_per_second: Per device, "No Freezing".
        frozen_tokens_per_second: Per device, "TimelyFreeze".
        freeze_ratio: "Frz. Ratio" of TimelyFreeze as a fraction: the mean over all steps, those
            before the plan included.
    """

    tokens_per_second: float
    frozen_tokens_per_second: float
    freeze_ratio: float

    @property
    def gain(self) -> float:
        """Throughput gained, as a fraction."""
        return self.frozen_tokens_per_second / self.tokens_per_second - 1.0


class PaperTable(NamedTuple):
    """One table of arXiv:2602.05754: where it stands, its devices, and its rows by schedule."""

    source: str
    rows: dict[str, PaperRow]


METRICS = (
    "max_freeze_ratio", "step_ms", "frozen_step_ms", "gain", "upper_bound_gain", "mean_ratio",
    "tokens_per_second",
)  # fmt: skip
# Copied by hand.
PAPER = {
    "Llama-3.2-1B": PaperTable(
        "Table 4, 4 x A6000",
        {
            "GPipe": PaperRow(6965, 8821, 0.1997),
            "1F1B": PaperRow(7152, 9257, 0.1553),
            "Interleaved1F1B": PaperRow(6800, 8355, 0.3789),
            "ZBVZeroBubble": PaperRow(7541, 9426, 0.3965),
        },
    ),
    "Llama-3-8B": PaperTable(
        "Table 1, 4 x H200",
        {
            "GPipe": PaperRow(5737, 7821, 0.3564),
            "1F1B": PaperRow(5748, 7867, 0.3314),
            "Interleaved1F1B": PaperRow(6173, 8081, 0.6007),
            "ZBVZeroBubble": PaperRow(6889, 8939, 0.6992),
        },
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Print the table and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=sorted(PAPER))
    parser.add_argument("plans", type=Path, nargs="+", metavar="PLAN.json")
    options = parser.parse_args(arguments)

    def work() -> int:
        cases = [case for path in options.plans for case in read_cases(path)]
        print(render(options.model, cases))
        return 0

    return status_of(work)


def read_cases(path: Path) -> list[dict[str, Any]]:
    """Return the cases of a plan file that have the default split and a cap as the paper's.

    Raises:
        ValueError: If it is no plan file.
    """
    try:
        cases = parse_json(path.read_text())["cases"]
        found = [
            case
            for case in cases
            if case["split"] == DEFAULT_SPLIT and case["max_freeze_ratio"] != AUTO
        ]
        for case in found:
            if not isinstance(case["schedule"], str):
                raise ValueError(f"schedule is {shown(case['schedule'])}")
            for key in METRICS:
                if key != "tokens_per_second" or case[key] is not None:
                    number_of(key, case[key])
        return found
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not what `timelyfreeze plan --json` writes: {error!r}"
        ) from None


def render(model: str, cases: Iterable[dict[str, Any]]) -> str:
    """Return the table: a row for each case whose schedule the paper has measured."""
    paper = PAPER[model]
    heads = [
        "schedule", "r_max", "batch, ms: planned", "paper", "frozen, ms: planned", "paper",
        "gain: planned", "paper", "upper bound", "freeze ratio: planned", "paper",
    ]  # fmt: skip
    rows, sizes = [], set()
    for case in cases:
        measured = paper.rows.get(case["schedule"])
        if measured is None:
            continue
        if case["tokens_per_second"] is not None:
            sizes.add(round(case["tokens_per_second"] * case["frozen_step_ms"] / 1e3))
        paper_ms = 1e3 * TOKENS_PER_DEVICE / measured.tokens_per_second
        frozen_paper_ms = 1e3 * TOKENS_PER_DEVICE / measured.frozen_tokens_per_second
        rows.append([
            case["schedule"], f"{case['max_freeze_ratio']:g}",
            f"{case['step_ms']:.1f}", f"{paper_ms:.1f}",
            f"{case['frozen_step_ms']:.1f}", f"{frozen_paper_ms:.1f}",
            f"{case['gain']:+.1%}", f"{measured.gain:+.1%}", f"{case['upper_bound_gain']:+.1%}",
            f"{case['mean_ratio']:.2f}", f"{measured.freeze_ratio:.2f}",
        ])  # fmt: skip
    about = (
        f"{model}; paper: {paper.source}. The paper's batches are its tokens/s: "
        f"{TOKENS_PER_DEVICE:.0f} tokens a device over them, so messages, optimizer and data are "
        "in them, and not in the planned ones. Its freeze ratio is the mean over all steps, the "
        "planned one that of the stable phase."
    )
    if sizes - {round(TOKENS_PER_DEVICE)}:
        about += (
            f" PLANNED FOR ANOTHER BATCH, of {', '.join(map(str, sorted(sizes)))} tokens a device: "
            "times cannot be compared."
        )
    return "\n".join([about, "", markdown_table(heads, rows)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
