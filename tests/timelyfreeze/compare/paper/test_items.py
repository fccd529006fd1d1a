"""Which runs stand behind the paper's tables and figures, and how long they train."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from timelyfreeze.cli.main import main
from timelyfreeze.compare.paper.items import COMPARED, FIGURE, ITEMS, TABLE, Item, Study, study_of
from timelyfreeze.compare.plots import TIMELINES
from timelyfreeze.compare.runs.parts import can_go_on
from timelyfreeze.compare.runs.run import find_runs
from timelyfreeze.records.tables import STEPS

LLAMA_1B, LLAMA_8B, LLAMA_13B = (study_of({"of": size}) for size in ("1b", "8b", "13b"))
KEYS = "freezing.max_freeze_ratio", "freezing.apf.threshold", "freezing.autofreeze.percentile"


def item(kind: str, number: int) -> Item:
    (found,) = (one for one in ITEMS if (one.kind, one.number) == (kind, number))
    return found


def asked(schedules: list[str], methods: list[str], seeds: Sequence[int] = ()) -> Namespace:
    return Namespace(schedules=schedules, methods=methods, seeds=seeds, small=False, emulate=False)


def more_ranks(number: int) -> Study:
    """The runs of Figs. 11 to 13."""
    (found,) = item(FIGURE, number).studies
    return found


def test_every_table_and_every_figure_is_there_once() -> None:
    assert [one.number for one in ITEMS if one.kind == TABLE] == list(range(1, 11))
    assert [one.number for one in ITEMS if one.kind == FIGURE] == list(range(1, 16))
    missing = ["table 2", "figure 1", "figure 2", "figure 3"]
    assert [one.name for one in ITEMS if one.missing] == missing
    assert [one.name for one in ITEMS if one.plot == (COMPARED, TIMELINES)] == [
        f"figure {number}" for number in range(7, 14)
    ]


def test_hours_are_those_of_the_papers_own_speed() -> None:
    tokens = 800 * 128 * 1024
    one = replace(LLAMA_1B, schedules=("GPipe",), methods=("none",), seeds=(42,))
    assert one.hours() == pytest.approx(tokens / (4 * 6965) / 3600)
    two = replace(one, methods=("none", "timelyfreeze"))
    assert two.hours() == pytest.approx(tokens / 4 / 3600 * (1 / 6965 + 1 / 8821))
    assert LLAMA_1B.n_runs == 4 * 6 * 3
    assert LLAMA_13B.n_runs == 4 * 6


def test_hours_of_pictures_are_those_that_the_paper_trained() -> None:
    (vit,) = item(TABLE, 10).studies
    assert (vit.n_ranks, vit.n_runs) == (8, 8)
    gpipe, one_f_one_b = (14339, 12082, 13050, 11195), (13374, 11305, 11991, 10266)
    assert vit.hours() == pytest.approx((sum(gpipe) + sum(one_f_one_b)) / 3600)


def test_small_classifiers_stand_for_the_papers_and_keep_how_they_are_cut() -> None:
    small = [study.small() for study in item(TABLE, 9).studies]
    cuts = ("memory", "parameter", "time")
    assert [one.folder for one in small] == [f"small_convnextv2_l_{name}" for name in cuts]
    assert [one.keys["parallelism.partition"] for one in small] == ["memory", "parameters", "time"]
    assert small[2].profiled == small[1].folder
    assert all(one.is_small and one.is_emulated for one in small)
    assert {one.keys["model.name"] for one in small} == {"convnextv2"}
    (vit,) = (study.small() for study in item(TABLE, 10).studies)
    assert (vit.file.name, vit.n_ranks) == ("paper_small_pictures.toml", 8)


def test_small_runs_read_files_of_the_repository() -> None:
    """So nothing is fetched."""
    small = [study.small() for one in ITEMS for study in one.studies]
    sections = [one.settings()[name] for one in small for name in ("training", "validation")
                if name in one.settings()]  # fmt: skip
    assert all((ROOT / section["dataset_path"]).exists() for section in sections)
    assert not any(key.endswith("dataset_path") for one in small for key in one.keys)


def test_every_run_of_the_paper_is_by_its_preset_and_cap_the_small_ones_too() -> None:
    for one in ITEMS:
        for study in one.studies:
            caps = []
            for ran in (study, study.small()):
                freezing = ran.settings()["freezing"]
                assert ran.keys.get("freezing.preset", freezing.get("preset")) == "paper"
                caps.append(ran.keys.get("freezing.max_freeze_ratio", freezing["max_freeze_ratio"]))
            assert caps[0] == caps[1]


def test_controls_are_one_for_each_method_and_vary_in_one_folder() -> None:
    studies = item(FIGURE, 6).studies
    assert {study.folder for study in studies} == {"llama3_2_1b_controls"}
    assert tuple(study.vary[0].split("=")[0] for study in studies) == KEYS
    assert [study.n_runs for study in studies] == [18, 18, 18]  # none, and five values
    # 800 steps of 128 x 1024 tokens, three seeds; 1F1B at the speeds of Table 4.
    tokens = 3 * 800 * 128 * 1024
    assert studies[0].hours() == pytest.approx(tokens / 4 / 3600 * (1 / 7152 + 5 / 9257))


@pytest.mark.parametrize(
    ("figure", "n_ranks", "rows", "step"), [(11, 6, 12, 120), (12, 6, 12, 120), (13, 8, 16, 128)]
)
def test_with_more_ranks_there_are_as_many_microbatches(
    figure: int, n_ranks: int, rows: int, step: int
) -> None:
    study = more_ranks(figure)
    assert study.keys["training.local_batch_size"] == rows
    assert study.keys["training.global_batch_size"] == step
    words = study.command(Path("out"), None, [])
    assert words[words.index("--nproc") + 1] == str(n_ranks)


def test_a_command_says_all_that_the_paper_sets() -> None:
    words = LLAMA_1B.command(Path("out"), "--limit 4", ["--debug.deterministic"])
    assert words[0] == "run"
    assert words[1].endswith("train_configs/paper_llama3_2_1b.toml")
    assert words[2] == "out/llama3_2_1b"
    assert words[words.index("--seeds") + 1 :][:3] == ["42", "22", "11"]
    assert "--evaluate=--limit 4" in words
    assert words[words.index("--") + 1 :] == ["--debug.deterministic"]


def test_small_runs_are_emulated_by_one_process() -> None:
    study = more_ranks(12).small()
    words = study.command(Path("out"), None, [])
    assert words[1].endswith("train_configs/paper_small.toml")
    assert words[words.index("--nproc") + 1] == "1"
    keys = words[words.index("--") + 1 :]
    assert sorted(keys) == [
        "--emulation.enable",
        "--parallelism.pipeline_parallel_degree=6",
        "--training.local_batch_size=12",
    ]


def test_a_small_model_stands_for_the_smallest_and_another_for_the_larger_ones() -> None:
    """Whose runs are made once, and are not taken for the paper's."""
    small = [study.small() for study in (LLAMA_1B, LLAMA_8B, LLAMA_13B)]
    assert [one.folder for one in small] == ["small_debugmodel", "small_8M", "small_8M"]
    assert [one.keys.get("model.flavor") for one in small] == ["debugmodel", None, None]
    assert item(FIGURE, 6).studies[0].small().folder == "small_debugmodel_controls"
    assert more_ranks(13).small().folder == "small_8M_8_ranks"


def test_an_item_is_narrowed_and_keeps_none() -> None:
    table = item(TABLE, 4).narrowed(asked(["1F1B"], ["apf"], [7]))
    (study,) = table.studies
    assert (study.schedules, study.methods, study.seeds) == (("1F1B",), ("none", "apf"), (7,))
    figure = item(FIGURE, 6).narrowed(asked([], ["apf"]))
    assert [study.methods for study in figure.studies] == [("none", "apf")]


@pytest.mark.parametrize(
    ("schedules", "methods"), [(["DualPipeV"], []), (["1F1B"], ["timelyfreeze", "lisa"])]
)
def test_what_an_item_does_not_have_is_refused(schedules: list[str], methods: list[str]) -> None:
    with pytest.raises(ValueError, match=r"table 4 has no run of (DualPipeV|lisa); it has 1F1B, "):
        item(TABLE, 4).narrowed(asked(schedules, methods))


def test_the_page_has_every_piece_of_the_paper() -> None:
    """2 algorithms, 55 equations, 10 tables, 15 figures, each in one row of its first column."""
    text = (Path(__file__).resolve().parents[4] / "docs/paper.md").read_text()
    firsts = [line.split(" | ")[0].strip("| ") for line in text.splitlines() if line[:2] == "| "]
    for kind, count in {"Algorithm": 2, "Eq.": 55, "Table": 10, "Figure": 15}.items():
        cells = [cell for cell in firsts if cell.startswith(kind)]
        numbers: list[int] = []
        for cell in cells:
            cell = cell.split(", [")[0]
            for first, last in re.findall(r"(\d+)(?: to (\d+))?", cell):
                numbers += range(int(first), int(last or first) + 1)
        assert sorted(numbers) == list(range(1, count + 1)), kind


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


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_command_that_was_killed_goes_on_inside_its_run(paper: Paper, tmp_path: Path) -> None:
    """With all its processes, as when a machine goes down."""
    words = ["table", "4", str(tmp_path), "--small", "--schedules", "1F1B", "--methods", "none"]
    words += ["--", "--training.steps=12", "--training.seq_len=32", "--training.local_batch_size=8"]
    words += ["--checkpoint.interval=4"]
    run = tmp_path / "small_debugmodel/1F1B/none/seed_42"
    command = [sys.executable, "-m", "timelyfreeze", "paper", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not can_go_on(run):
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.02)
        for pid in [process.pid, *_below(process.pid)]:
            os.kill(pid, signal.SIGKILL)
    paper(*words)
    assert not (tmp_path / "small_debugmodel/set_aside").exists()
    (found,) = find_runs([tmp_path]).runs
    assert len(found.step_ends) == 12
    assert STEPS.read(found.folder)[0].step in (5, 9)


def _below(pid: int) -> list[int]:
    """Processes that a process started, and those that they did."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [one for child in map(int, children) for one in (child, *_below(child))]
