"""The paper's values: against its own arithmetic, and against its text where that is at hand."""

import re
from pathlib import Path

import pytest

from timelyfreeze.compare.paper.studies import BASE, TOLD, measured

SCORES = TOLD["columns"]["scores"]
ROOT = Path(__file__).resolve().parents[4]
TEXTS = sorted((ROOT.parent / "shared/papers").glob("000_*.txt"))
WORDS = {
    "No Freezing": "none",
    "APF": "apf",
    "AutoFreeze": "autofreeze",
    "TimelyFreeze": "timelyfreeze",
    "+APF": "timelyfreeze+apf",
    "+AutoFreeze": "timelyfreeze+autofreeze",
}


def test_every_method_under_every_schedule_is_there() -> None:
    methods = [key for key in measured() if key[2] != BASE]
    # Three language models; ViT, and ConvNeXt under three partitions.
    assert len(methods) == 3 * 4 * 6 + 4 * 2 * 4
    assert len(measured()) == len(methods) + 3


PICTURES = [key for key, values in measured().items() if "top1_percent" in values]


@pytest.mark.parametrize("key", [key for key in PICTURES if key[2] != "none"])
def test_differences_in_top1_and_time_are_those_of_the_values(key: tuple[str, str, str]) -> None:
    values, none = measured()[key], measured()[*key[:2], "none"]
    points = values["top1_percent"] - none["top1_percent"]
    # Each rounded.
    assert values["top1_points"] == pytest.approx(points, abs=0.021)
    saved = 100 * (1 - values["seconds"] / none["seconds"])
    assert values["time_saved_percent"] == pytest.approx(saved, abs=0.01)


@pytest.mark.parametrize("key", [key for key in measured() if key not in PICTURES])
def test_the_average_is_that_of_the_four(key: tuple[str, str, str]) -> None:
    values = measured()[key]
    # Of means over seeds, each rounded.
    assert sum(values[one] for one in SCORES[:4]) / 4 == pytest.approx(values["accuracy"], abs=0.01)


@pytest.mark.parametrize(
    ("model", "schedule", "method", "gain"),
    [
        ("Llama-3-8B", "GPipe", "timelyfreeze", 36.33),
        ("Llama-3-8B", "1F1B", "timelyfreeze+apf", 39.59),
        ("Llama-3.2-1B", "Interleaved1F1B", "apf", 11.24),
        ("Llama-3.2-1B", "ZBVZeroBubble", "timelyfreeze", 25.01),
        ("Llama-2-13B", "1F1B", "timelyfreeze+apf", 46.63),
        ("Llama-2-13B", "ZBVZeroBubble", "autofreeze", 4.90),
    ],
)
def test_gains_are_those_that_the_paper_prints(
    model: str, schedule: str, method: str, gain: float
) -> None:
    assert measured()[model, schedule, method]["gain_percent"] == pytest.approx(gain, abs=0.02)


@pytest.mark.skipif(not TEXTS, reason="no text of the paper beside the checkout (../shared)")
def test_scores_stand_in_the_papers_text() -> None:
    lines = re.sub(r"</?b>", "", TEXTS[0].read_text()).splitlines()
    rows = {tuple(cell.strip() for cell in line.split("\t") if cell.strip()) for line in lines}
    for (_, _, method), values in measured().items():
        if "top1_percent" in values:
            continue
        numbers = tuple(f"{values[key]:.2f}" for key in SCORES)
        names = [word for word, ours in WORDS.items() if ours == method]
        assert (*names, *numbers) in rows
