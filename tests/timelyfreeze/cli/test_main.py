"""The command: its map, and what it says of words that are no command."""

import argparse
import os
import signal
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from timelyfreeze.cli.main import COMMANDS, main, usage

ROOT = Path(__file__).resolve().parents[3]


def test_the_map_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line.startswith("  ")] == [*COMMANDS]
    assert set(COMMANDS) == {
        "train", "plan", "profile", "draw", "compare", "paper", "evaluate", "export", "estimate",
        "samples", "doctor",
    }  # fmt: skip


@pytest.mark.parametrize("words", [["odd"], ["--odd"], [""], ["-x", "plan"]])
def test_other_words_are_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert f"{words[0]!r} is no command" in capsys.readouterr().err


def test_the_version_is_that_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"timelyfreeze {project['version']}\n"


def test_without_a_command_the_map_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert usage() in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_tells_its_options_under_its_own_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: timelyfreeze {name}")


def test_a_command_whose_extra_is_not_installed_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [m for m in sys.modules if m.startswith("timelyfreeze.plots")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "timelyfreeze.plots.drawing", None)
    monkeypatch.setattr(
        "timelyfreeze.cli.main.import_module",
        lambda name: (_ for _ in ()).throw(ModuleNotFoundError("no", name="matplotlib")),
    )
    assert main(["draw", "x"]) == 2
    assert 'needs matplotlib, which is not installed: pip install "timelyfreeze[plots]"' in (
        capsys.readouterr().err
    )


def test_whoever_has_read_enough_is_told_nothing() -> None:
    """As ``timelyfreeze plan BOUNDS | head -1``, with a pipe whose reader is gone."""
    bounds = ROOT / "profiles" / "tiny_8m_1F1B" / "bounds.json"
    for words in (["--help"], ["plan", str(bounds), "--schedules", "1F1B", "--r-max", "0.5"]):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "timelyfreeze", *words]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=100)
        os.close(writer)
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_is_told_in_a_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", interrupt)
    assert main([name, "x"]) == 130
    assert capsys.readouterr() == ("", "\nInterrupted\n")


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("name", ["plan", "estimate"])
def test_ctrl_c_ends_a_process_that_reads(name: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "timelyfreeze", name, str(pipe)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        subprocess.Popen(
            command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process,
        pipe.open("w"),  # which waits until the command reads
    ):
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=100)
    assert (process.returncode, said) == (130, (b"", b"\nInterrupted\n"))
    assert list(tmp_path.iterdir()) == [pipe]


def test_the_map_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom timelyfreeze.cli.main import main\nmain(['--help'])\n"
        "print([m for m in ('torch', 'numpy', 'highspy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.endswith("[]\n")


def test_no_help_waits_for_torch() -> None:
    """Torch takes seconds. Afterwards the release is found whole."""
    code = (
        "import contextlib, sys\nfrom timelyfreeze.cli.main import COMMANDS, main\n"
        "for name in (n for n, c in COMMANDS.items() if c.module.startswith('torchtitan')):\n"
        "    with contextlib.suppress(SystemExit): main([name, '-h'])\n"
        "print([m for m in ('torch', 'transformers', 'torchtitan') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.endswith("[]\n")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchtitan") is None, reason="TorchTitan is not installed")
def test_our_part_of_torchtitan_is_found_from_every_folder(tmp_path: Path) -> None:
    import torchtitan.freezing  # from the folder of the checkout, as pytest starts there

    ours = str(ROOT / "torchtitan/freezing/__init__.py")
    assert torchtitan.freezing.__file__ == ours
    code = (
        "from timelyfreeze.cli import overlay; overlay.install()\n"
        "import importlib.util as u, torchtitan.freezing, torchtitan.train\n"
        "print(torchtitan.freezing.__file__, u.find_spec('torchtitan').loader is not None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [ours, "True"]
