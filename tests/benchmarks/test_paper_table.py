"""The paper's metrics beside planned ones: by hand, and against what the configurations quote."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from paper_table import PAPER, main

CONFIGS = Path(__file__).parents[2] / "train_configs"


def case(
    schedule: str,
    split: str = "default",
    tokens_per_second: float = 8192.0,
    max_freeze_ratio: float | str = 0.8,
) -> dict[str, Any]:
    return {
        "schedule": schedule,
        "split": split,
        "max_freeze_ratio": max_freeze_ratio,
        "step_ms": 700.0,
        "frozen_step_ms": 500.0,
        "gain": 0.4,
        "upper_bound_gain": 0.5,
        "mean_ratio": 0.25,
        "tokens_per_second": tokens_per_second,
    }


def write(path: Path, *cases: dict[str, Any]) -> str:
    path.write_text(json.dumps({"cases": cases}))
    return str(path)


def test_a_row_for_each_schedule_of_the_paper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = [
        write(tmp_path / "a.json", case("GPipe"), case("GPipe", "balanced"), case("LoopedBFS")),
        write(
            tmp_path / "b.json",
            case(
                "ZBVZeroBubble", max_freeze_ratio="auto"
            ),  # the planner's default, not the paper's
            case("ZBVZeroBubble"),
        ),
    ]
    assert main(["Llama-3-8B", *plans]) == 0
    about, *table = capsys.readouterr().out.strip().splitlines()
    assert "Table 1, 4 x H200" in about
    assert "ANOTHER BATCH" not in about
    # 4096 tokens at 5737, 7821, 6889 and 8939 tokens/s; the paper prints +36.33% and +29.75%.
    assert table[3:] == [
        "| GPipe | 0.8 | 700.0 | 714.0 | 500.0 | 523.7 | +40.0% | +36.3% | +50.0% | 0.25 | 0.36 |",
        "| ZBVZeroBubble | 0.8 | 700.0 | 594.6 | 500.0 | 458.2 | +40.0% | +29.8% | +50.0% | 0.25 "
        "| 0.70 |",
    ]


def test_a_plan_for_another_batch_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write(tmp_path / "a.json", case("1F1B", tokens_per_second=512.0))
    assert main(["Llama-3.2-1B", plan]) == 0
    assert "ANOTHER BATCH, of 256 tokens a device" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cases": [{}]}'])
def test_another_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "x.json").write_text(text)
    assert main(["Llama-3-8B", str(tmp_path / "x.json")]) == 2
    assert "x.json is not what `timelyfreeze plan --json` writes" in (capsys.readouterr().err)


@pytest.mark.parametrize(
    ("model", "config"),
    [("Llama-3.2-1B", "llama3_2_1b_alpaca_gpt4"), ("Llama-3-8B", "llama3_8b_openhermes")],
)
def test_the_metrics_are_those_that_the_configurations_quote(model: str, config: str) -> None:
    text = (CONFIGS / f"{config}.toml").read_text()
    for schedule, row in PAPER[model].rows.items():
        (quoted,) = re.findall(rf"^# +{schedule} .*$", text, re.MULTILINE)
        assert f", {row.tokens_per_second} " in quoted
        assert f"({row.gain:+.1%})" in quoted
        assert f", {row.frozen_tokens_per_second} " in quoted
        assert quoted.endswith(f"{row.freeze_ratio:.3f}")
