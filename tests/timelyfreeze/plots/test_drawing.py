"""``python -m timelyfreeze draw``: files, what it says, exit status."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image

from tests.timelyfreeze.plots.folders import write_measured, write_plan, write_settings
from timelyfreeze.__main__ import main
from timelyfreeze.plots.drawing import draw_run
from timelyfreeze.plots.style import MOST_PNG_BYTES
from timelyfreeze.settings.phases import Phase

ROOT = Path(__file__).resolve().parents[3]
TIMELINES = ("timeline_measured", "timeline_predicted")


def test_a_run_with_everything_has_plots_and_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(tmp_path)
    write_plan(tmp_path)
    write_measured(tmp_path, Phase.UPPER_BOUND, Phase.STABLE)
    assert main(["draw", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for name in TIMELINES:
        png, svg = (tmp_path / "plots" / f"{name}.{ending}" for ending in ("png", "svg"))
        with Image.open(png) as image:
            image.load()
        assert png.stat().st_size < MOST_PNG_BYTES
        assert ElementTree.parse(svg).getroot().tag.endswith("svg")
        assert f"wrote {png}" in said
    for name in ("trace_measured", "trace_predicted"):
        assert json.loads((tmp_path / "plots" / f"{name}.json").read_text())["traceEvents"]
    assert not list((tmp_path / "plots").glob("*.part"))


def test_a_plan_alone_gives_its_prediction_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = tmp_path / "run", tmp_path / "a" / "b"
    run.mkdir()
    write_plan(run)
    before = sorted(run.iterdir())
    assert main(["draw", str(run), "--output", str(output)]) == 0
    assert sorted(run.iterdir()) == before, "the run folder stays as it is"
    assert {"timeline_predicted.png", "trace_predicted.json"} <= {p.name for p in output.iterdir()}
    assert "no timeline_measured: " in capsys.readouterr().out


def test_a_broken_file_spoils_its_own_plot_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(tmp_path)
    write_measured(tmp_path, Phase.STABLE)
    (tmp_path / "timelines" / "measured_stable.json").write_text("{}")
    assert main(["draw", str(tmp_path)]) == 1
    assert "error: timeline_measured: " in capsys.readouterr().err
    assert (tmp_path / "plots" / "timeline_predicted.png").exists()


def test_an_empty_folder_has_nothing_and_says_so(tmp_path: Path) -> None:
    drawn = draw_run(tmp_path)
    assert (drawn.files, drawn.broken) == ((), {})
    assert set(TIMELINES) <= set(drawn.missing)


@pytest.mark.parametrize("command", ["draw", "export"])
def test_of_several_runs_one_has_to_be_named(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("20260102_a", "20260103_b"):
        (tmp_path / "tb" / name).mkdir(parents=True)
        (tmp_path / "tb" / name / "settings.json").write_text("{}")
    assert main([command, str(tmp_path)]) == 2
    last = tmp_path / "tb" / "20260103_b"
    assert f"holds 2 runs; name one, such as the last, {last}" in capsys.readouterr().err


def test_no_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is no folder" in capsys.readouterr().err


def test_where_plots_cannot_go_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["draw", str(tmp_path), "--output", str(tmp_path / "file" / "plots")]) == 2
    told = capsys.readouterr().err
    assert "file' is no folder; name another with --output" in told
    assert "Errno" not in told


def test_matplotlib_is_loaded_only_to_draw() -> None:
    """A training process imports the caller of this, and must not pay for it."""
    code = (
        "import sys, timelyfreeze.plots.drawing, timelyfreeze.plots.drawing;"
        "print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
