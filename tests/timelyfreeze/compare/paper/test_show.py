"""The paper's values: against its own arithmetic, and against its text where that is at hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from timelyfreeze.compare.paper.command import main
from timelyfreeze.compare.paper.items import BASE, METHODS, TOLD, Study, measured, study_of
from timelyfreeze.compare.paper.show import over_all_steps

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


LLAMA_1B, LLAMA_8B, LLAMA_13B = (study_of({"of": size}) for size in ("1b", "8b", "13b"))


def case(
    schedule: str, split: str = "default", max_freeze_ratio: float | str = 0.8
) -> dict[str, Any]:
    return {
        "schedule": schedule,
        "split": split,
        "max_freeze_ratio": max_freeze_ratio,
        "gain": 0.4,
        "upper_bound_gain": 0.5,
        "mean_ratio": 0.25,
        "tokens_per_second": 8400.0,
    }


def write(path: Path, *cases: dict[str, Any], outside_ms: float = 0.0) -> str:
    path.write_text(json.dumps({"outside_ms": outside_ms, "cases": cases}))
    return str(path)


def test_a_row_for_each_method_under_each_planned_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = [
        write(tmp_path / "a.json", case("GPipe"), case("GPipe", "balanced"), case("LoopedBFS")),
        write(
            tmp_path / "b.json",
            case("ZBVZeroBubble", max_freeze_ratio="auto"),  # the planner's, not the paper's
            case("ZBVZeroBubble"),
        ),
    ]
    assert main(["table", "1", "--plans", *plans]) == 0
    text = capsys.readouterr().out
    assert "4 x H200" in text
    assert "tell their time with `timelyfreeze plan --outside-ms`" in text
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    schedules = ("GPipe", "ZBVZeroBubble")
    assert [line.split(" | ")[:2] for line in lines] == [
        [f"| {schedule}", method] for schedule in schedules for method in METHODS
    ]
    # 8,400 / 1.4 = 6,000. Over 2,000 steps 20 freeze all; 50 ramp up to 1/4, at the mean 51/100 of
    # it; 1,750 freeze 1/4.
    assert lines[0] == ("| GPipe | none | 6000 | 5737 | - | +0.0 | - | 0.000 | 0.000 | 0.000 |")
    assert lines[1] == "| GPipe | apf | - | 7293 | - | +27.1 | - | - | - | 0.288 |"
    assert lines[3] == (
        "| GPipe | timelyfreeze | 8400 | 7821 | +40.0 | +36.3 | +50.0 | 0.250 | 0.232 | 0.356 |"
    )
    assert lines[-1].startswith("| ZBVZeroBubble | timelyfreeze+autofreeze | 8400 | 8909 | +40.0 |")


def test_steps_that_have_more_than_batches_are_not_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write(tmp_path / "a.json", case("1F1B"), outside_ms=12.0)
    assert main(["table", "5", "--plans", plan]) == 0
    assert "--outside-ms" not in capsys.readouterr().out


def test_a_schedule_planned_twice_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = [write(tmp_path / name, case("1F1B")) for name in ("a.json", "b.json")]
    assert main(["table", "4", "--plans", *plans]) == 2
    assert "b.json plans 1F1B once more; one plan of each schedule" in capsys.readouterr().err


def test_plans_of_another_cap_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", "4", "--plans", write(tmp_path / "a.json", case("1F1B", "default", 0.5))])
    assert "a.json: no plan with r_max 0.8 and the default split" in capsys.readouterr().err


def test_plans_run_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write(tmp_path / "a.json", case("1F1B"))
    assert main(["table", "4", "--small", "--schedules", "1F1B", "--plans", plan]) == 2
    assert "leave out --small, --schedules" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"outside_ms": 0.0, "cases": [{}]}'])
def test_another_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "x.json").write_text(text)
    assert main(["table", "1", "--plans", str(tmp_path / "x.json")]) == 2
    assert "x.json is not what `timelyfreeze plan --json` writes" in (capsys.readouterr().err)


@pytest.mark.parametrize("what", [("table", "6"), ("figure", "5")])
def test_plans_have_no_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: tuple[str, str]
) -> None:
    assert main([*what, "--plans", write(tmp_path / "a.json", case("1F1B"))]) == 2
    assert "--plans is for tables 1, 4, 5" in capsys.readouterr().err


def test_the_mean_over_all_steps_is_that_of_algorithm_1() -> None:
    freezing = LLAMA_1B.settings()["freezing"]
    warmup, monitor, ramp = (
        freezing[f"last_{name}_step"] for name in ("warmup", "monitor", "ramp")
    )
    ratios = []
    for t in range(1, 801):
        if t <= (warmup + monitor) / 2:
            ratios.append(0.0)
        elif t <= monitor:
            ratios.append(1.0)
        else:
            ratios.append(min(0.3, 0.3 * (t - monitor) / (ramp - monitor)))
    assert over_all_steps(LLAMA_1B, 0.3) == pytest.approx(sum(ratios) / 800, rel=1e-12)


def test_the_papers_largest_ratios_are_the_cap_on_backwards_alone() -> None:
    """Eq. 8 counted over all nodes, forwards too, would let 0.8 freeze all: 0.90 of all steps."""
    largest = max(
        values["average_freeze_ratio"]
        for (model, _, method), values in measured().items()
        if model == LLAMA_13B.model and method.startswith("timelyfreeze")
    )
    assert largest == pytest.approx(over_all_steps(LLAMA_13B, 0.8), abs=0.002)
    assert over_all_steps(LLAMA_13B, 1.0) > 0.89


@pytest.mark.parametrize("study", [LLAMA_1B, LLAMA_8B, LLAMA_13B], ids=lambda study: study.model)
def test_the_values_are_those_that_the_configurations_quote(study: Study) -> None:
    text = study.file.read_text()
    for schedule in study.schedules:
        values = measured()[study.model, schedule, "timelyfreeze"]
        none = measured()[study.model, schedule, "none"]
        (quoted,) = re.findall(rf"^# +{schedule} .*$", text, re.MULTILINE)
        assert f", {none['device_tokens_per_second']:.0f} " in quoted
        gain = float(re.findall(r"\(\+([\d.]+)%\)", quoted)[0])
        assert gain == pytest.approx(values["gain_percent"], abs=0.1), "of unrounded tokens/s"
        assert f", {values['device_tokens_per_second']:.0f} " in quoted
        assert quoted.endswith(f"{values['average_freeze_ratio']:.3f}")
