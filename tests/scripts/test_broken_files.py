"""Broken run folders, tables and questions: each script ends with a table or with what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.mangling import DEEP, fuzzed, mangled_bytes, mangled_json, message_of
from tests.timelyfreeze.compare.run_folders import write_record, write_run, write_scores
from timelyfreeze.compare import command as compare
from timelyfreeze.compare.paper import command as paper
from timelyfreeze.compare.runs.run import find_runs
from timelyfreeze.records.summary import SUMMARY_FILE, RunSummary, read_summary, summary_to_json
from timelyfreeze.records.tables import LOSSES, STEPS

pytestmark = pytest.mark.slow

STEP_ROWS = "\n1,stable,1,1,1,,0,,,,,\n2,stable,2,1,1,,0.5,,,,,\n3,stable,3,1,1,,,,,,,\n"
SETTINGS = {
    "freezing": {"max_freeze_ratio": 0.8},
    "parallelism": {"pipeline_parallel_degree": 2},
}
FIGURES = {
    "tokens_per_second": 100.0,
    "step_ms": 10.0,
    "batch_ms": 8.0,
    "batch_ms_predicted": 8.5,
    "outside_ms": 1.0,
    "stage_ratios": {"0": 0.5, "1": 0.25},
    "emulated_ranks": 2,
    "failure": None,
}
NUMBERS = dict.fromkeys(("gain", "upper_bound_gain", "mean_ratio", "tokens_per_second"), 0.5)
CASE = {"schedule": "GPipe", "split": "default", "max_freeze_ratio": 0.8, **NUMBERS}
CASES = {"outside_ms": 0.0, "cases": [CASE]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, what it is compared with, scores and a record."""
    folder = tmp_path_factory.mktemp("runs")
    losses = [(0.5, 3.0), (1.0, 2.0)]
    for method in ("none", "apf"):
        run = write_run(folder / method, method, losses=losses, **FIGURES)
        (run / "settings.json").write_text(json.dumps(SETTINGS))
    write_scores(folder / "apf", 0.5)
    write_record(folder / "apf", 0, variant={"freezing.max_freeze_ratio": "0.8"})
    (folder / "apf/steps.csv").write_text(",".join(STEPS.header) + STEP_ROWS)
    return folder


MAINS: dict[str, Callable[[Path], int]] = {
    "compare_table": lambda folder: compare.main(["show", "--table", str(folder)]),
    "compare_show": lambda folder: compare.main(["show", str(folder), "--output", str(folder)]),
}
FILES = ["summary.json", "losses.csv", "settings.json", "scores.json", "steps.csv"]
FILES += ["comparison_run.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("script", list(MAINS))
def test_a_broken_file_of_a_run_is_told_and_the_others_tabled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: Path,
    capfd: pytest.CaptureFixture[str],
    script: str,
    name: str,
) -> None:
    # What is drawn of them takes its time.
    monkeypatch.setattr(compare, "plots", lambda groups, terms: [])
    folder = tmp_path / "runs"
    shutil.copytree(whole, folder)
    path = folder / "apf" / name
    data = path.read_bytes()
    values = (
        mangled_json(json.loads(data)).map(str.encode) if name.endswith("json") else st.nothing()
    )

    @fuzzed(12)
    @given(broken=mangled_bytes(data) | values | st.just(DEEP.encode()))
    def breaks(broken: bytes) -> None:
        path.write_bytes(broken)
        capfd.readouterr()
        status = MAINS[script](folder)
        said = capfd.readouterr()
        printed = said.out + said.err
        assert status == (1 if script.startswith("compare") and "not read" in printed else 0)
        assert "1F1B" in printed or "not read" in printed
        assert len(said.err) < 2000
        if broken == DEEP.encode() and name in ("summary.json", "comparison_run.json"):
            assert "not read" in printed

    breaks()


@fuzzed(30)
@given(data=mangled_bytes(json.dumps(CASES).encode()) | mangled_json(CASES).map(str.encode))
def test_a_broken_plan_file_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], data: bytes
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    capfd.readouterr()
    status = paper.main(["table", "4", "--plans", str(path)])
    assert status == 0 or (status == 2 and str(path) in capfd.readouterr().err)


SUMMARY = RunSummary(
    method="none",
    model="llama3 8M",
    dataset="c4",
    n_devices=1,
    ranks_per_replica=1,
    device="CPU",
    torch_version="2",
    steps=10,
    started_at="2026-11-22T00:00:00+00:00",
    stage_ratios={0: 0.5},
)


@fuzzed(40)
@given(text=mangled_json(json.loads(summary_to_json(SUMMARY))) | st.just(DEEP))
def test_what_is_no_summary_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / SUMMARY_FILE).write_text(text)

    def read() -> None:
        summary = read_summary(tmp_path)
        assert isinstance(summary.steps, int)
        assert summary.stage_ratios is None or all(
            isinstance(stage, int) for stage in summary.stage_ratios
        )

    message_of(read)


@fuzzed(30)
@given(data=mangled_bytes(b"step,seconds,train_loss,validation_loss\n1,0.5,2.0,\n2,1.0,,1.5\n"))
def test_broken_losses_are_told(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "losses.csv"
    path.write_bytes(data)
    message = message_of(lambda: LOSSES.read(path.parent))
    assert message is None or "losses.csv" in message


WORDS: list[Any] = [
    "table",
    "show",
    "run",
    "-1",
    "x",
    "/no/such",
    "--window",
    "0",
    "--output",
    "--",
    "--odd",
]
WORDS += ["--reference", "--title", "x" * 5000, "/dev/null/x", "9" * 400]
WORDS += ["nan", "--seeds", ""]


def test_any_command_line_is_refused_with_what_is_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    @fuzzed(25)
    @given(arguments=st.lists(st.sampled_from(WORDS), max_size=6))
    def breaks(arguments: list[str]) -> None:
        capfd.readouterr()
        try:
            status = compare.main(arguments)
        except SystemExit as error:  # argparse
            status = error.code
        assert status == 2
        assert "error: " in capfd.readouterr().err

    breaks()


def test_a_folder_without_runs_is_told(tmp_path: Path) -> None:
    assert find_runs([tmp_path]).runs == ()
    with pytest.raises(ValueError, match="is not a folder"):
        find_runs([tmp_path / "none"])
