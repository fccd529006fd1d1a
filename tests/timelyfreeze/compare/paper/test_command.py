"""`timelyfreeze paper`: what it tells, runs and shows; the trainer is a stand-in."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.timelyfreeze.compare.run_folders import keys_of, write_run, write_scores
from timelyfreeze.compare.paper.command import main
from timelyfreeze.records.tables import RESPONSES

SPEEDS = {"none": 7000.0, "apf": 8400.0}


class Trainer:
    """Stands in for torchrun: writes what a run writes."""

    def __init__(self) -> None:
        self.keys: list[dict[str, str]] = []

    def __call__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
        keys = keys_of(command)
        self.keys.append(keys)
        method, schedule = (
            keys["freezing.method"], keys["parallelism.pipeline_parallel_schedule"]
        )  # fmt: skip
        run = write_run(
            Path(keys["job.dump_folder"]) / "tb/name", method, schedule=schedule,
            seed=int(keys["debug.seed"]), tokens_per_second=SPEEDS[method], mfu_percent=20.0,
            average_freeze_ratio=None if method == "none" else 0.3,
        )  # fmt: skip
        write_scores(run, 0.37)
        return 0


FEW = ["--schedules", "GPipe", "--methods", "apf", "--seeds", "42", "22"]


def test_a_table_is_run_once_and_shown_beside_the_paper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    words = ["table", "4", str(tmp_path), *FEW]
    assert main([*words, "--", "--debug.deterministic"], starter=trainer) == 0
    assert len(trainer.keys) == 4
    assert {keys["debug.seed"] for keys in trainer.keys} == {"42", "22"}
    said = capsys.readouterr().out
    assert "| | before training | - | 34.93 | - |" in said
    assert "Ours: 2 x some CPU, 2 cores, llama3 8M." in said
    assert not (tmp_path / "table_4.md").exists(), "of a part no file is kept"
    assert main([*words, "--", "--debug.deterministic"], starter=trainer) == 0
    assert len(trainer.keys) == 4, "what is there is not run again"
    line = next(
        one for one in capsys.readouterr().out.splitlines() if one.startswith("| GPipe | apf | 37")
    )
    # Ours, the paper's and the difference: accuracy, freeze ratio, tokens/s, gain, MFU.
    assert line == (
        "| GPipe | apf | 37.00 | 35.86 | +1.14 | 0.300 | 0.351 | -0.051 | 8,400 | 8,183 | +217 "
        "| +20.0 | +17.5 | +2.5 | 20.00 | 18.81 | +1.19 |"
    )


def test_a_whole_table_is_kept(tmp_path: Path) -> None:
    for method in ("none", "apf"):
        write_run(tmp_path / "llama2_13b/1F1B" / method, method)
    assert main(["table", "5", str(tmp_path), "--show"]) == 0
    assert "| 1F1B | apf |" in (tmp_path / "table_5.md").read_text()


def test_seeds_that_are_not_asked_for_are_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["table", "4", str(tmp_path), *FEW], starter=Trainer())
    capsys.readouterr()
    words = ["table", "4", str(tmp_path), "--schedules", "GPipe", "--seeds", "7", "--show"]
    assert main(words) == 1
    assert "no run of table 4 has finished" in capsys.readouterr().out


@pytest.mark.parametrize("broken", ["tb/name/summary.json", "../../../base_model/scores.json"])
def test_what_cannot_be_read_is_told_and_the_rest_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    main(["table", "4", str(tmp_path), *FEW], starter=Trainer())
    path = (tmp_path / "llama3_2_1b/GPipe/apf/seed_42" / broken).resolve()
    path.parent.mkdir(exist_ok=True)
    path.write_text("{")
    capsys.readouterr()
    assert main(["table", "4", str(tmp_path), *FEW, "--show"]) == 1
    said = capsys.readouterr().out
    assert f"not read: {path.parent}" in said
    assert "| GPipe | none | 37.00 |" in said


def test_another_table_of_the_same_runs_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    main(["table", "4", str(tmp_path), *FEW], starter=trainer)
    capsys.readouterr()
    assert main(["table", "6", str(tmp_path), *FEW, "--show"], starter=trainer) == 0
    assert len(trainer.keys) == 4
    # Scores of the 0.37 that the stand-in writes, beside MMLU 32.04 of the paper.
    assert "| GPipe | none | 37.00 | 32.04 | +4.96 |" in capsys.readouterr().out


def test_the_model_before_training_stands_above(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["table", "4", str(tmp_path), *FEW], starter=Trainer())
    base = tmp_path / "llama3_2_1b/base_model"
    base.mkdir(exist_ok=True)
    write_scores(base, 0.35)
    capsys.readouterr()
    assert main(["table", "4", str(tmp_path), *FEW, "--show"]) == 0
    assert "| | before training | 35.00 | 34.93 | +0.07 |" in capsys.readouterr().out


def test_without_an_output_it_tells_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "4"]) == 0
    text = capsys.readouterr().out
    for words in (
        "4 x A6000", "./assets/hf/Llama-3.2-1B", "alpaca, from the hub", "72 runs, 64 hours",
        "timelyfreeze compare run ", "accuracies come with --evaluate",
    ):  # fmt: skip
        assert words in text
    assert main(["figure", "7", "--small"]) == 0
    text = capsys.readouterr().out
    assert "one, for 4 emulated ranks" in text
    assert "paper_small.toml" in text


def test_settings_are_those_of_the_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "3"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert "| dataset | training.dataset | Alpaca-GPT4 | Alpaca-GPT4 | OpenHermes" in lines[0]
    assert "| T_w | freezing.last_warmup_step | 60 | 60 | 160 | 160 | 150 | 150 |" in lines
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")][2:]
        assert cells[::2] == cells[1::2], line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["table", "11"], "table 11 is not there; tables are 1, 2, 3"),
        (["figure", "16"], "figure 16 is not there; figures are 1, 2"),
        (["figure", "3"], "figure 3 is not here: a drawing of the idea (no runs are in it"),
        (["figure", "5", "OUT"], "figure 5 shows accuracies; say how runs are scored: --evaluate"),
        (["table", "4", "--show"], "--show needs OUTPUT"),
        (["table", "4", "OUT", "--show"], "llama3_2_1b is not there; run table 4 first"),
    ],
)
def test_what_cannot_be_shown_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main([str(tmp_path) if word == "OUT" else word for word in words]) == 2
    assert said in capsys.readouterr().err


class PictureTrainer(Trainer):
    """Writes top-1, seconds and the bounds of a plan."""

    def __call__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
        keys = keys_of(command)
        self.keys.append(keys)
        method = keys["freezing.method"]
        top1, seconds = {"none": (0.5, 100.0), "timelyfreeze": (0.48, 80.0)}[method]
        run = write_run(
            Path(keys["job.dump_folder"]) / "tb/name", method, seed=int(keys["debug.seed"]),
            schedule=keys["parallelism.pipeline_parallel_schedule"], seconds=seconds,
            validation_top1=top1, average_freeze_ratio=None if method == "none" else 0.3,
        )  # fmt: skip
        if method != "none":
            (run / "bounds.json").write_text("{}")
        return 0


def test_pictures_are_shown_by_partition_the_second_cut_by_the_firsts_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = PictureTrainer()
    words = ["table", "9", str(tmp_path), "--small", "--schedules", "1F1B"]
    assert main([*words, "--methods", "timelyfreeze"], starter=trainer) == 0
    partitions = [keys["parallelism.partition"] for keys in trainer.keys]
    assert partitions == [name for name in ("memory", "parameters", "time") for _ in range(2)]
    (profile,) = {keys.get("parallelism.partition_profile") for keys in trainer.keys[4:]}
    assert profile is not None
    assert Path(profile).parent.parent.parent.name == "seed_42"
    assert Path(profile).is_relative_to(tmp_path / "small_convnextv2_l_parameter")
    said = capsys.readouterr().out
    # Top-1, over none, time saved, freeze ratio: ours, the paper's, the difference.
    for text in (
        "table 9: ConvNeXt-V2-L on Food-101 under three partitions. The paper's: 4 x RTX 3090.",
        "| ConvNeXt-V2-L by parameter | 1F1B | timelyfreeze | 48.00 | "
        "91.04 | -43.04 | -2.00 | -0.55 | -1.45 "
        "| +20.0 | +22.5 | -2.5 | 0.300 | 0.313 | -0.013 |",
        "| ConvNeXt-V2-L by time | 1F1B | timelyfreeze | 48.00 | "
        "91.28 | -43.28 | -2.00 | -0.40 | -1.60 "
        "| +20.0 | +18.2 | +1.8 | 0.300 | 0.460 | -0.160 |",
    ):
        assert text in said


class ElasticTrainer(Trainer):
    """Writes a run that takes 80 s without freezing; freezing takes half, with moves of 5 s."""

    def __call__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
        keys = keys_of(command)
        self.keys.append(keys)
        method, moves = keys["freezing.method"], "--freezing.elastic.enable" in command
        seconds = 80.0 if method == "none" else 40.0 - 20.0 * moves
        write_run(
            Path(keys["job.dump_folder"]) / "tb/name", method, seed=int(keys["debug.seed"]),
            schedule="GPipe", seconds=seconds, moves_seconds=5.0 if moves else None,
            validation_loss=0.5, validation_top1=0.9,
        )  # fmt: skip
        return 0


def test_parts_of_an_older_system_stand_in_a_table_with_one_run_of_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = ElasticTrainer()
    words = ["pipetransformer", "9", str(tmp_path), "--seeds", "42"]
    assert main(words, starter=trainer) == 0
    assert [keys["freezing.method"] for keys in trainer.keys].count("none") == 1
    assert len(trainer.keys) == 6
    said = capsys.readouterr().out
    assert said[said.rindex("pipetransformer 9:") :].count("| GPipe | none |") == 1
    rows = {
        row.split(" | ")[0].strip("| "): row for row in said.splitlines() if "| GPipe | p" in row
    }
    # Speed-up of the steps, and time saved with the moves in it.
    for part, cells in {
        "freezing alone": "2.00 | 0.95 | +1.05 | +50.0 | - | - ",
        "+ AutoPipe, AutoDP": "4.00 | 2.27 | +1.73 | +68.8 | - | - ",
        "+ AutoPipe": "4.00 | - | - | +68.8 | - | - ",
    }.items():
        assert f"| GPipe | pipetransformer | {cells}| 0.500" in rows[part], said


def test_all_of_them_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 + 15 + 2
    assert lines[3].startswith("table 4 ")
    assert main(["figure"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 15


def test_a_figure_is_of_its_own_runs_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figure 15 is of timelyfreeze; none, which has no backward that freezes, stands beside it."""
    folder = tmp_path / "llama3_2_1b/1F1B"
    write_run(folder / "none/seed_42", "none")
    frozen = write_run(folder / "timelyfreeze/seed_42", "timelyfreeze")
    rows = [
        ",".join(RESPONSES.header),
        "0,B,upper_bound,0,0.0,2.0,0",
        "0,B,lower_bound,0,1.0,1.0,0",
    ]
    (frozen / RESPONSES.name).write_text("\n".join(rows) + "\n")
    assert main(["figure", "15", str(tmp_path), "--show"]) == 0
    said = capsys.readouterr().out
    assert f"wrote {tmp_path / 'figure_15.png'}" in said
    assert "missing" not in said
