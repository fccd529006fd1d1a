"""The notebook runs from its first cell to its last, and shows what it promises."""

import json
from pathlib import Path
from typing import Any

import pytest

TOUR = Path(__file__).resolve().parents[2] / "examples/tour.ipynb"


@pytest.mark.long
def test_the_tour_emulates_plans_and_draws(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(TOUR.parent)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    told: list[str] = []
    names: dict[str, Any] = {}
    for cell in json.loads(TOUR.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "outputs are of one machine; clear them"
            exec(compile("".join(cell["source"]), str(TOUR), "exec"), names)
            told.append(capsys.readouterr().out)
    trained, planned, drawn = told
    assert "batch with freezing" in trained
    assert "[parallelism]\npipeline_parallel_schedule = " in planned
    assert "timeline" in drawn
