"""The small way through the paper, with real runs: a table with scores, and figures of them."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from timelyfreeze.cli.main import main

Paper = Callable[..., str]
ROOT = Path(__file__).resolve().parents[4]
QUESTIONS = ROOT.parent / "shared/data/eval"
ONE = ["--schedules", "1F1B", "--methods", "timelyfreeze"]
FEW_STEPS = [
    "--", "--training.steps=20", "--training.seq_len=64", "--training.local_batch_size=8",
]  # fmt: skip


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Paper:
    """The command, whose runs are processes of their own."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def said(*words: str) -> str:
        status, told = main(["paper", *words]), capsys.readouterr()
        assert status == 0, told.out[-3000:] + told.err[-3000:]
        return told.out

    return said


def rows(said: str) -> dict[tuple[str, str], list[str]]:
    """Cells of the last table by schedule and method."""
    lines = said[said.rindex("| schedule | method |") :].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {(row[0], row[1]): row[2:] for row in cells if len(row) > 2}


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_tables_and_figures_of_the_same_runs(paper: Paper, tmp_path: Path) -> None:
    small = [str(tmp_path), "--small"]
    said = paper("table", "4", *small, *ONE, *FEW_STEPS)
    assert "[2/2] 1F1B timelyfreeze seed 42" in said
    # Ours, the paper's and the difference: accuracy, freeze ratio, tokens/s, gain, MFU.
    cells = rows(said)["1F1B", "timelyfreeze"]
    assert (cells[1], cells[4], cells[7], cells[10]) == ("36.36", "0.155", "9,257", "+29.4")
    assert 0.2 < float(cells[3]) < 0.8, "a cap of 0.8, less what is before the plan"
    assert float(cells[6].replace(",", "")) > 0
    for number in ("4", "15"):
        said = paper("figure", number, *small, *FEW_STEPS)
        assert "finished before" in said
        assert "timelyfreeze, 1F1B over 4 ranks" in (tmp_path / f"figure_{number}.svg").read_text()
    paper("figure", "14", *small, *ONE[2:], *FEW_STEPS)
    assert (tmp_path / "figure_14.svg").exists()


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None or not QUESTIONS.is_dir(),
    reason="lm-eval is not installed, or no questions are beside the checkout (../shared)",
)
def test_the_average_is_that_of_the_four_benchmarks(paper: Paper, tmp_path: Path) -> None:
    """Without the examples that lm-eval shows first, which are most of the text."""
    questions = f"--evaluate=--data-dir {QUESTIONS} --limit 2 -- --num_fewshot 0"
    said = paper("table", "6", str(tmp_path), "--small", *ONE, questions, *FEW_STEPS)
    scores = rows(said)["1F1B", "timelyfreeze"]
    assert 0.0 <= float(scores[12]) <= 100.0
    assert sum(map(float, scores[0:12:3])) / 4 == pytest.approx(float(scores[12]), abs=0.01)
    shown = paper("table", "4", str(tmp_path), "--small", *ONE, "--show")
    assert rows(shown)["1F1B", "timelyfreeze"][0] == scores[12]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_batches_of_six_ranks(paper: Paper, tmp_path: Path) -> None:
    said = paper("figure", "11", str(tmp_path), "--small", "--methods", "apf", "timelyfreeze")
    assert "[3/3] GPipe timelyfreeze seed 42" in said
    assert (tmp_path / "figure_11.png").stat().st_size > 10_000
    assert "the paper: TimelyFreeze gains up to 10 points more than APF" in said
