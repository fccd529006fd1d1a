"""Files of a configuration and command lines, broken in every way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.mangling import DEEP, fuzzed, mangled_bytes, message_of
from timelyfreeze.cli.doctor.command import _output_of
from torchtitan.freezing.checks import ConfigError, check_data
from torchtitan.freezing.launch import launch, read_config
from torchtitan.freezing.values.command_line import form_errors, read_toml
from torchtitan.settings.job_config import job_config_class
from torchtitan.upstream import fixes as upstream_fixes

ROOT = Path(__file__).resolve().parents[2]
CLASS = job_config_class()
TOML = (ROOT / "train_configs" / "tiny_8m.toml").read_bytes()


@fuzzed(100)
@given(data=mangled_bytes(TOML))
def test_a_broken_file_is_named_with_its_line_or_key(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(data)

    def read() -> None:
        found = list(form_errors(CLASS, read_toml(str(path))))
        assert all(len(error) < 2000 for error in found)

    message = message_of(read, refusals=(ConfigError,))
    assert message is None or f"job.config_file is '{path}'" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("freezing = 3", "freezing is 3; it is a section, [freezing]"),
        ("[freezing]\napf = 3", "freezing.apf is 3; it is a section, [freezing.apf]"),
        (
            "[freezing]\nmetod = 'apf'",
            "freezing.metod is no key of the configuration; the nearest is freezing.method",
        ),
        ("[freezin]\nseed = 1", "freezin is no key of the configuration; the nearest is freezing"),
        ("[freezing]\nseed = 1.5", "freezing.seed is 1.5; it must be a whole number"),
        ("[freezing]\nseed = true", "freezing.seed is True; it must be a whole number"),
        ("[freezing]\nmin_gain = nan", "freezing.min_gain is nan; it must be a number"),
        (
            "[freezing]\nmax_freeze_ratio = [0.5, '1']",
            "freezing.max_freeze_ratio is [0.5, '1']; it must be a number or a list, each a number",
        ),
        ("[freezing.apf]\nalpha = 'low'", "freezing.apf.alpha is 'low'; it must be a number"),
        ("[data]\nshuffle = 'yes'", "data.shuffle is 'yes'; it must be true or false"),
        ("[training]\nsteps = 'ten'", "training.steps is 'ten'; it must be a whole number"),
        ("[training]\ndtype = 'fp8'", "training.dtype is 'fp8'; it must be one of \"bfloat16\", "),
        ("[model]\nconverters = 'x'", "model.converters is 'x'; it must be a list, each a text"),
        ("[model]\nflavor = 'no such'", "model.flavor is 'no such', which llama3 does not have"),
        ("[model]\nname = 'no such'", "no such"),
        ("[freezing", "which is no TOML: Expected ']' at the end of a table declaration (at "),
        ("\udcff", "which is no TOML: 'utf-8' codec can't decode byte 0xff"),
        (f"a = {DEEP}", "which is no TOML: it is nested too deeply"),
        ("[job]\ncustom_config_module = 'no.such'", "No module named 'no'"),
    ],
)  # fmt: skip
def test_an_error_ends_the_launch_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert launch([f"--job.config_file={path}"], local_rank=0) == 2
    assert expected in capsys.readouterr().out
    assert not dist.is_initialized()


def test_all_errors_of_form_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[freezing]\nseed = '1'\nspeed = 1\n[data]\npacking = 1\n")
    with pytest.raises(ConfigError, match="3 errors") as error:
        read_config(["--job.config_file", str(path)])
    assert str(error.value).count(f"(in {path})") == 3


@pytest.mark.parametrize(
    "path", ["/no/such/file", ".", "x" * 5000, "/dev/null/x"], ids=["none", "folder", "long", "odd"]
)
def test_a_file_that_cannot_be_read_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match=r"job\.config_file is .*, which cannot be read: "):
        read_config([f"--job.config_file={path}"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--freezing.solver_time_limit_s=nan"],
        ["--freezing.max_freeze_ratio", "0.5", "nan"],
        ["--optimizer.lr=nan"],
        ["--freezing.apf.alpha=nan"],
    ],
    ids=str,
)
def test_a_command_line_can_set_no_nan(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"nan\]?; it must be a number"):
        read_config(arguments)


def test_misspelled_flags_are_told_as_misspelled_keys_of_a_file() -> None:
    words = ["--freezing.sed=1", "--freezing.apf.alhpa=2", "--trainign.steps", "3", "--odd"]
    with pytest.raises(ConfigError) as error:
        read_config([*words, "--data.no_shuffle"])
    told = str(error.value)
    assert "freezing.sed is no key of the configuration; the nearest is freezing.seed" in told
    assert "freezing.apf.alhpa is no key of the configuration; the nearest is freezing.apf" in told
    assert "trainign is no key of the configuration; the nearest is training" in told
    assert "odd is no key of the configuration; known: " in told
    assert "shuffle" not in told


WORDS = ["--freezing.seed", "--freezing.seed=", "--freezing.seed=x", "--freezing.odd=1", "--", "-1"]
WORDS += ["--freezing.max_freeze_ratio", "0.5", "nan", "--data.no_shuffle", "", "\x00", "=", "--=="]
WORDS += ["--job.config_file", "--job.config_file=", "--freezing.apf", "--freezing.apf.alpha=1e999"]


@pytest.mark.slow
@fuzzed(15)
@given(arguments=st.lists(st.sampled_from(WORDS) | st.text(max_size=6), min_size=1, max_size=4))
def test_any_command_line_is_parsed_or_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    refusal: BaseException | None = None
    try:
        read_config(arguments)
    except (ConfigError, SystemExit) as error:
        refusal = error
    printed = capsys.readouterr()
    if isinstance(refusal, SystemExit):
        assert refusal.code == 2 or {"-h", "--help"} & set(arguments)
        assert printed.err or printed.out


def test_shipped_configurations_have_no_error_of_form() -> None:
    upstream_fixes.install()
    for path in sorted((ROOT / "train_configs").glob("*.toml")):
        assert list(form_errors(CLASS, read_toml(str(path)))) == []


def test_every_path_may_begin_with_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "x.toml"
    path.write_text('[job]\ndump_folder = "~/out"\n[data]\npaths = ["~/a", "b~"]\n')
    config = read_config([f"--job.config_file={path}", "--model.hf_assets_path=~/model"])
    assert config.job.dump_folder == f"{tmp_path}/out"
    assert config.model.hf_assets_path == f"{tmp_path}/model"
    assert config.data.paths == [f"{tmp_path}/a", "b~"]


def test_the_folder_of_nobody_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('[job]\ndump_folder = "~nouser/x"\n')
    with pytest.raises(ConfigError, match=r"job\.dump_folder is '~nouser/x', and there is no such"):
        read_config([f"--job.config_file={path}"])


@pytest.mark.parametrize("path", ["~\0", "~/\0"])
def test_a_path_that_no_system_takes_is_not_there(path: str) -> None:
    job_config = read_config(["--training.dataset=alpaca", "--data.paths", path])
    with pytest.raises(ConfigError, match="no such file or folder"):
        check_data(job_config)


def test_a_file_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('[job]\ndump_folder = "out"\n', encoding="utf-8-sig")
    assert read_config([f"--job.config_file={path}"]).job.dump_folder == "out"
    assert _output_of(path) == Path("out")
