"""Broken files of a run folder: each spoils its own plots only, and is named."""

import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from tests.fuzz.mangling import DEEP, SCALARS, fuzzed, mangled_bytes, mangled_json, message_of
from tests.timelyfreeze.plots.folders import write_measured, write_plan, write_settings
from timelyfreeze.__main__ import main
from timelyfreeze.plots import gallery, style
from timelyfreeze.plots.gallery import read_names, run_title
from timelyfreeze.records.tables import (
    COUNTS,
    FRONT,
    LOSSES,
    PLASTICITY,
    RESPONSES,
    STEPS,
    FrontRow,
    FrozenCount,
    PlasticityRow,
    ResponseRow,
    StepRow,
    read_responses,
)
from timelyfreeze.records.timeline import timeline_from_json
from timelyfreeze.settings.phases import Phase
from torchtitan.freezing.report.losses import read_reference

PHASES = ["warmup", "upper_bound", "lower_bound", "ramp", "stable", "stable"]
# What is drawn from a file, besides the titles.
DRAWN_FROM = {
    "steps.csv": ["curves", "convergence"],
    "losses.csv": ["loss"],
    "front.csv": ["front"],
    "plasticity.csv": ["front"],
    "responses.csv": ["response"],
    "frozen_counts.csv": ["histogram"],
    "timelines/measured_stable.json": ["timeline_measured", "trace_measured"],
    "plan.json": ["timeline_predicted", "trace_predicted"],
    "bounds.json": ["timeline_predicted", "trace_predicted"],
    "schedule.csv": ["timeline_predicted", "trace_predicted"],
    "settings.json": ["titles"],
    "response.json": ["response"],
}
DRAW: dict[str, Callable[[Path], Any]] = dict((*gallery.PLOTS, *gallery.TRACES))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every file that plots are drawn from."""
    folder = tmp_path_factory.mktemp("run")
    write_settings(folder)
    write_plan(folder)
    write_measured(folder, Phase.UPPER_BOUND, Phase.STABLE)
    STEPS.write(
        folder,
        [
            StepRow(n, phase, float(n), 500.0, 1000.0, None, 0.25, 480.0, 470.0, 2.5, 0.75, 0.5)
            for n, phase in enumerate(PHASES, start=1)
        ],
    )
    rows = "".join(f"{n},{n}.5,{5.0 / n:.3f},\n{n},{n}.5,,2.75\n" for n in range(1, 12))
    (folder / "losses.csv").write_text(f"step,seconds,train_loss,validation_loss\n{rows}")
    FRONT.write(
        folder,
        [
            FrontRow(n, phase, max(0, n - 4), 2, n // 4, max(0, n - 4), int(n < 4))
            for n, phase in enumerate(PHASES, start=1)
        ],
    )
    PLASTICITY.write(folder, [PlasticityRow(n, max(0, n - 4), 0.5 / n, 0.25) for n in (4, 5, 6)])
    RESPONSES.write(
        folder,
        [
            ResponseRow(stage, "B", phase, m, fraction, 2.0 - fraction)
            for stage in (0, 1)
            for phase, fraction in (("upper_bound", 0.0), ("lower_bound", 1.0), ("stable", 0.5))
            for m in (0, 1)
        ],
    )
    COUNTS.write(folder, [FrozenCount(r, r, f"layers.{r}.w", 10, 8, 3) for r in (0, 1)])
    return folder


PROFILE = {
    "stages": [
        {
            "stage": stage,
            "first_stage": "per_tensor" if stage == 0 else None,
            "curves": {
                "B": {"points": [{"fraction": s, "median_ms": 2.0 - s} for s in (0.0, 0.5, 1.0)]}
            },
        }
        for stage in (0, 1)
    ]
}

CELLS = [
    "",
    "0",
    "-1",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e300",
    "9" * 400,
    "9" * 5000,
    "x",
    "$x^{",
    '"',
]
CELLS += ["stable", "B", "0x10", "1_0", " 3", "\x00", "ä", "\u2028", "True", "999999999"]


@st.composite
def mangled_table(draw: st.DrawFn, whole: str) -> bytes:
    """Draw the text of a table with something else in one cell, or a row that is too long."""
    rows = [line.split(",") for line in whole.splitlines()]
    row = draw(st.sampled_from(rows))
    row[draw(st.integers(0, len(row) - 1))] = draw(st.sampled_from(CELLS) | st.text(max_size=5))
    if draw(st.integers(0, 9)) == 0:
        row.append(draw(st.sampled_from(CELLS)))
    return "".join(",".join(cells) + "\n" for cells in rows).encode("utf-8", "replace")


def broken_bytes(name: str, data: bytes) -> st.SearchStrategy[bytes]:
    if name.endswith("json"):
        values = mangled_json(json.loads(data)).map(str.encode) | st.just(DEEP.encode())
    else:
        values = mangled_table(data.decode())
    return values | values | mangled_bytes(data)


def drawn(folder: Path, name: str) -> None:
    """Draw a plot to its end, as ``style.save`` would, but once and small."""
    found = DRAW[name](folder)
    if isinstance(found, Figure):
        with style.house_style():
            found.savefig(io.BytesIO(), format="svg", dpi=20)
    elif name.startswith("trace") and found is not None:
        assert json.loads(found)["traceEvents"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in DRAWN_FROM if n != "settings.json"])
def test_a_broken_file_is_named_or_drawn(tmp_path: Path, whole: Path, name: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    if name == "response.json":
        (folder / "responses.csv").unlink()
        (folder / name).write_text(json.dumps(PROFILE))
    path = folder / name

    @fuzzed(8)
    @given(data=broken_bytes(name, path.read_bytes()))
    def breaks(data: bytes) -> None:
        path.write_bytes(data)
        for plot in DRAWN_FROM[name]:
            message = message_of(lambda: drawn(folder, plot))  # noqa: B023
            assert message is None or path.name in message, message

    breaks()


@fuzzed(15)
@given(data=st.data())
def test_broken_settings_spoil_no_plot_and_are_told(
    tmp_path: Path, whole: Path, data: st.DataObject
) -> None:
    path = tmp_path / "settings.json"
    path.write_bytes(data.draw(broken_bytes(path.name, (whole / path.name).read_bytes())))
    message = message_of(lambda: read_names(tmp_path))
    assert message is None or str(path) in message
    title = run_title(tmp_path, "Losses")
    assert 0 < len(title) < 500
    assert message is None or title == f"Losses\n{tmp_path.name}"


READERS: dict[str, Callable[[Path], Any]] = {
    "steps.csv": STEPS.read,
    "losses.csv": LOSSES.read,
    "responses.csv": read_responses,
    "front.csv": FRONT.read,
    "plasticity.csv": PLASTICITY.read,
    "frozen_counts.csv": COUNTS.read,
}


@pytest.mark.parametrize("name", READERS)
def test_a_cell_that_is_none_is_named_with_its_line(tmp_path: Path, whole: Path, name: str) -> None:
    path = tmp_path / name
    text = (whole / name).read_text()

    @fuzzed(40)
    @given(data=mangled_table(text))
    def breaks(data: bytes) -> None:
        path.write_bytes(data)
        rows: list[Any] = []
        message = message_of(lambda: rows.extend(READERS[name](tmp_path)))
        if message is not None:
            assert str(path) in message
            assert "line " in message or "columns" in message
        for row in rows:
            assert all(value is not None for value in list(vars(row).values())[:2])
            numbers = [value for value in vars(row).values() if isinstance(value, int | float)]
            assert not any(isinstance(n, int) and abs(n) > 1e15 for n in numbers)
            assert 0.0 <= (getattr(row, "fraction", 0.0)) <= 1.0

    breaks()


@fuzzed(30)
@given(
    key=st.sampled_from(["rank", "start_ms", "end_ms", "freeze_ratio", "is_critical"]),
    value=SCALARS,
)
def test_a_number_of_a_timeline_that_is_none_is_named_by_its_key(
    whole: Path, key: str, value: object
) -> None:
    data = json.loads((whole / "timelines/measured_stable.json").read_text())
    data["actions"]["1F0"][key] = value
    message = message_of(lambda: timeline_from_json(json.dumps(data)))
    is_kind = {
        "rank": type(value) is int,
        "is_critical": type(value) is bool,
    }.get(key, type(value) in (int, float) and math.isfinite(min(value, 1e300)))  # type: ignore[type-var]
    assert is_kind or f"actions.1F0.{key} is " in str(message)


@fuzzed(30)
@given(data=st.data())
def test_losses_of_a_reference_that_are_none_are_told_with_key_and_file(
    tmp_path: Path, whole: Path, data: st.DataObject
) -> None:
    path = tmp_path / "losses.csv"
    path.write_bytes(data.draw(broken_bytes(path.name, (whole / path.name).read_bytes())))
    (tmp_path / "summary.json").write_bytes(
        data.draw(mangled_json({"device": "CPU"}).map(str.encode) | st.just(DEEP.encode()))
    )

    def read() -> None:
        reference = read_reference(tmp_path)
        assert math.isfinite(reference["reference_loss"])
        assert 0.0 <= reference["reference_seconds"] < math.inf
        assert isinstance(reference["reference_device"], str | None)

    message = message_of(read)
    assert message is None or "report.reference_run is " in message


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        b"\xff\x00",
        *(pytest.param(data, marks=pytest.mark.long) for data in (b"", DEEP.encode())),
    ],
    ids=["no text", "empty", "deep"],
)
@pytest.mark.parametrize("name", DRAWN_FROM)
def test_the_others_are_drawn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    whole: Path,
    name: str,
    data: bytes,
) -> None:
    """What is drawn is not looked at here."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    monkeypatch.setattr(style, "save", lambda metric, output, title: (output / f"{title}.png",) * 2)
    path = folder / name
    path.write_bytes(data)
    if name == "response.json":
        (folder / "responses.csv").unlink(missing_ok=True)
    status = main(["draw", str(folder)])
    printed = capfd.readouterr()
    assert status == 1
    errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    wrong = {line.split(": ")[1] for line in errors}
    assert wrong == set(DRAWN_FROM[name])
    assert printed.err.count(path.name) >= len(wrong)
    for plot in {*DRAW} - wrong:
        assert f"/{plot}." in printed.out


def test_a_folder_in_place_of_a_file_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in DRAWN_FROM:
        (tmp_path / name).mkdir(parents=True)
    assert main(["draw", str(tmp_path)]) == 1
    errors = capfd.readouterr().err
    for names in DRAWN_FROM.values():
        for plot in names:
            assert f"error: {plot}: " in errors
