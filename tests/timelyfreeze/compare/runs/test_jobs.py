"""How a run is started."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.timelyfreeze.compare.run_folders import keys_of, write_run
from timelyfreeze.cli import checker
from timelyfreeze.compare.command import main
from timelyfreeze.compare.runs import jobs, scoring
from timelyfreeze.compare.runs.jobs import ROOT, Settings
from timelyfreeze.compare.runs.sweep import plan_jobs

(JOB,) = plan_jobs(["apf"], ["GPipe"], [7], 2)


def test_the_command_of_a_run() -> None:
    words = JOB.command(Settings(Path("small.toml"), ("--a.b=c",), degree=2), Path("out"))
    assert words[:6] == [
        sys.executable, "-m", "timelyfreeze.cli.torchrun", "--nproc_per_node=2",
        "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0",
    ]  # fmt: skip
    assert words[6:10] == ["-m", "timelyfreeze.cli.worker", "--job.config_file", "small.toml"]
    assert words[-1] == "--a.b=c"
    assert keys_of(words[10:]) == {
        "job.dump_folder": "out",
        "freezing.method": "apf",
        "freezing.seed": "7",
        "debug.seed": "7",
        "data.seed": "7",
        "parallelism.pipeline_parallel_schedule": "GPipe",
        "parallelism.pipeline_parallel_degree": "2",
        "a.b": "c",
    }


@pytest.mark.parametrize(
    "given",
    [
        ("--parallelism.pipeline_parallel_degree=1",),
        ("--parallelism.pipeline-parallel-degree", "1"),
    ],
)
def test_a_degree_that_is_given_holds(given: tuple[str, ...]) -> None:
    words = JOB.command(Settings(Path("small.toml"), given, degree=2), Path("out"))
    assert [word for word in words if re.match("--parallelism.*degree", word)] == [given[0]]


@pytest.mark.parametrize(
    ("arguments", "emulates", "n_ranks"),
    [
        ((), True, 12),
        (("--emulation.no-enable", "--parallelism.pipeline-parallel-degree", "2"), False, 6),
        (("--emulation.no_enable", "--emulation.enable"), True, 12),
        (("--parallelism.tensor_parallel_degree=2",), True, 24),
    ],
)
def test_arguments_go_before_the_file(
    tmp_path: Path, arguments: tuple[str, ...], emulates: bool, n_ranks: int
) -> None:
    config = tmp_path / "small.toml"
    config.write_text(
        "[emulation]\nenable = true\n[parallelism]\npipeline_parallel_degree = 4\n"
        "data_parallel_replicate_degree = 3\ndata_parallel_shard_degree = -1\n"
    )
    settings = Settings(config, arguments)
    assert settings.is_on("emulation.enable") is emulates
    assert settings.n_ranks == n_ranks


@pytest.mark.parametrize("text", ["emulation = 3\n", "= no TOML"])
def test_a_file_that_is_wrong_is_left_to_those_who_check_it(tmp_path: Path, text: str) -> None:
    config = tmp_path / "small.toml"
    config.write_text(text)
    assert not Settings(config).is_on("emulation.enable")
    assert Settings(config).n_ranks == 1


Checked = list[tuple[str, Sequence[Sequence[str]]]]


def never(command: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
    raise AssertionError("a run was started")


def compare(config: Path, output: Path, *more: str) -> int:
    words = ["run", str(config), str(output), "--schedules", "1F1B", "--nproc", "2", *more]
    return main(words, starter=never)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, checked: Checked) -> None:
    """The trainer's own checks, in this process."""
    pytest.importorskip("torchtitan")

    def errors_of(
        module: str, lines: Sequence[Sequence[str]], variables: Mapping[str, str], folder: Path
    ) -> list[str | None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            for name, value in variables.items():
                patch.setenv(name, value)
            return [*checker._errors(module, lines)]

    monkeypatch.setattr(jobs, "errors_of", errors_of)


def test_all_runs_are_checked_before_the_first_starts(
    tmp_path: Path, checks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    words = ["--methods", "none", "apf", "nosuch", "--seeds", "1", "2", "--vary"]
    threshold = "freezing.apf.threshold=0.01,-1"
    config = ROOT / "train_configs/tiny_8m.toml"
    assert compare(config, output, *words, threshold, "--", "--training.seq_len=64") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error
    first, second = error.removeprefix("error: ").split(" cannot start:\n", 2)[:2]
    assert first == "1F1B apf apf.threshold -1 seed 1, 1F1B apf apf.threshold -1 seed 2"
    told, others = second.rsplit("\n", 1)
    assert told.startswith("The configuration has an error:\n  - freezing.apf.threshold is -1")
    assert others == "1F1B nosuch seed 1, 1F1B nosuch seed 2"
    assert "freezing.method is 'nosuch'" in error
    assert "1F1B none" not in error
    assert not output.exists()


def test_what_cannot_be_parsed_is_told_once(
    tmp_path: Path, checks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "small.toml"
    config.write_text("")
    words = ["--methods", "none", "apf", "--", "--unknown.key=1"]
    assert compare(config, tmp_path / "out", *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: 1F1B none seed 42, 1F1B apf seed 42 cannot start:\n")
    assert error.count("unknown is no key of the configuration") == 1


def test_options_of_evaluate_are_checked_before_the_first_run_starts(
    tmp_path: Path,
    checks: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(scoring, "find_spec", lambda name: name)
    config = tmp_path / "small.toml"
    config.write_text("[checkpoint]\nenable = true\n")
    words = ["--methods", "none", "--evaluate=--nosuch 3"]
    assert compare(config, tmp_path / "out", *words) == 2
    error = capsys.readouterr().err
    assert error == "error: --evaluate: unrecognized arguments: --nosuch 3\n"


def test_only_what_is_still_to_be_made_is_checked_and_in_a_folder_that_is_not_there(
    tmp_path: Path, checked: Checked
) -> None:
    config, output = tmp_path / "small.toml", tmp_path / "out"
    config.write_text("")
    write_run(output / "1F1B/none/seed_42/tb/x", "none")
    write_run(output / "1F1B/apf/seed_42/tb/x", "apf", steps_done=3)
    with pytest.raises(AssertionError, match="a run was started"):
        compare(config, output, "--methods", "none", "apf")
    ((module, (line,)),) = checked
    assert module == "torchtitan.freezing.launch"
    assert line[:2] == [
        f"--job.config_file={config}", f"--job.dump_folder={output}/1F1B/apf/seed_42_new",
    ]  # fmt: skip
    assert "--parallelism.pipeline_parallel_degree=2" in line
    assert "--freezing.method=apf" in line


def test_lines_are_checked_by_a_process_with_their_environment_and_in_their_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "their_check.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "def check(words):\n"
        "    print('not told')\n"
        "    if words == ['exit']:\n"
        "        raise SystemExit(print('what is wrong'))\n"
        "    if words:\n"
        "        raise ValueError(f'{words} {os.environ[\"RANKS\"]} {Path.cwd()}')\n"
    )
    variables = {"RANKS": "3", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    lines = [["--a=b", "c d"], [], ["exit"]]
    found = checker.errors_of("their_check", lines, variables, tmp_path)
    assert found == [f"['--a=b', 'c d'] 3 {tmp_path}", None, "not told\nwhat is wrong"]


def test_a_check_that_breaks_is_told() -> None:
    with pytest.raises(ValueError, match=r"by no\.such ended with status 1:\n(.*\n)*.*No module"):
        checker.errors_of("no.such", [[]], {}, ROOT)
