"""Command lines of what is started by hand: a wrong value is told by its option, and nothing runs.

Of each command the work is taken out, so that a command line that is taken shows as work begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import soak
from hypothesis import given
from hypothesis import strategies as st

import tests.tools.make_assets.__main__ as make_assets
import torchtitan.freezing.launch
from tests.fuzz.mangling import fuzzed
from torchtitan.evaluation import command as evaluate
from torchtitan.freezing import estimate as estimate_memory
from torchtitan.freezing import samples as show_samples
from torchtitan.freezing.profile import command as profile
from torchtitan.hf import export as hf_export
from torchtitan.vision import export_command

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "train_configs/tiny_8m.toml")
# A whole number, 1 or more; a fraction; a length of time.
COUNT = (["1", "7"], ["0", "-1", "nan", "1.5", "x", "", "9" * 30])
SEED = (["0", "7"], ["-1", "nan", "1.5", "x", "", "9" * 30])
TIME = (["0.5", "60"], ["0", "-1", "nan", "inf", "1e300", "x", ""])
WRITABLE = (["new/folder", "."], ["/dev/null/x", "a_file"])


class Begun(Exception):
    """The work has begun, with the given values."""


@dataclass(frozen=True)
class Command:
    """A command to be broken.

    Attributes:
        main: Takes the command line.
        work: Module and name of what must not be reached with a wrong value.
        always: Arguments that are needed.
        options: Right and wrong values of each option.
    """

    main: Callable[[Sequence[str]], int]
    work: tuple[Any, str]
    always: Sequence[str] = ()
    options: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)


COMMANDS = {
    "soak": Command(
        soak.main,
        (soak, "seconds_per_step"),
        [],
        {
            "OUTPUT": WRITABLE,
            "--minutes": TIME,
            "--kill-every": TIME,
            "--seed": SEED,
        },
    ),
    "evaluate": Command(
        evaluate.main,
        (evaluate, "find_model"),
        ["some_run"],
        {
            "--step": COUNT,
            "--data-dir": ([], ["/no/such", "a_file", "x" * 5000]),
            "--limit": COUNT,
            "--tasks": (["hellaswag", "mmlu,hellaswag"], ["mmlu,,x", "", "x" * 5000]),
            "--device": (["cpu"], ["cuda:99", "x", "cuda:-1", "", "cpu:x"]),
            "--dtype": (["float32"], ["float8", "x", ""]),
            "--batch-size": (["8", "auto"], ["0", "-1", "1.5", "x", "9" * 30, ""]),
        },
    ),
    "estimate_memory": Command(
        lambda arguments: estimate_memory.main([CONFIG, *arguments]),
        (torchtitan.freezing.launch, "read_config"),
        [],
        {"--device-gib": (["0.5", "80"], ["0", "-1", "nan", "inf", "x"])},
    ),
    "show_samples": Command(
        lambda arguments: show_samples.main([CONFIG, *arguments]),
        (torchtitan.freezing.launch, "prepare"),
        [],
        {"--samples": (["0", "7"], ["-1", "nan", "1.5", "x", ""])},
    ),
    "profile": Command(
        lambda arguments: profile.main([CONFIG, *arguments]),
        (torchtitan.freezing.launch, "read_config"),
        [],
        {
            "--ratios": (["0", "0.5"], ["-0.1", "1.1", "nan", "inf", "x"]),
            "--warmup": (["0", "3"], ["-1", "nan", "x"]),
            "--repeats": (["1", "9"], ["0", "-1", "nan", "x"]),
            "--output": WRITABLE,
        },
    ),
    "export_hf": Command(
        export_command.main,
        (hf_export, "export_run"),
        ["some_run"],
        {
            "STEP": (["3", "100"], ["x", "1.5", "nan", "3e2"]),
            "--dtype": (["bfloat16"], ["int8", "x", ""]),
            "--output": (["new"], []),
        },
    ),
    "make_assets": Command(
        make_assets.main,
        (make_assets, "make_files"),
        [],
        {"--output": (["new"], ["/dev/null", "a_file"])},
    ),
}


@pytest.fixture(params=COMMANDS)
def command(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """One of the commands, in a folder of its own and with its work taken out."""

    def begin(*_: Any, **__: Any) -> None:
        raise Begun

    chosen = COMMANDS[request.param]
    monkeypatch.setattr(*chosen.work, begin)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").write_text("x")
    return chosen


def as_words(values: dict[str, str], always: Sequence[str]) -> list[str]:
    """Return a command line; a value that begins with - belongs to its option."""
    positional = [value for option, value in values.items() if not option.startswith("-")]
    options = [f"{option}={value}" for option, value in values.items() if option.startswith("-")]
    return [*always, *positional, *options]


def ended(command: Command, arguments: Sequence[str]) -> int | None:
    """Return the status that a command ended with; None if its work began."""
    try:
        status: Any = command.main(arguments)
    except SystemExit as error:  # argparse
        status = error.code
    except Begun:
        status = None
    return status  # type: ignore[no-any-return]


def test_a_wrong_value_is_told_by_its_option_and_a_right_one_taken(
    command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    right = {option: values[0] for option, values in command.options.items() if values[0]}
    wrong = {option: values[1] for option, values in command.options.items()}
    ended(command, ["--help"])  # what is imported late is no part of what an error costs
    ended(command, as_words({o: v[0] for o, v in right.items()}, command.always))
    required = {o: v[0] for o, v in right.items() if not o.startswith("-")}

    @fuzzed(12)
    @given(data=st.data())
    def breaks(data: st.DataObject) -> None:
        chosen = {
            option: data.draw(st.sampled_from(values))
            for option, values in right.items()
            if data.draw(st.booleans())
        }
        chosen = {**required, **chosen}
        assert ended(command, as_words(chosen, command.always)) is None
        option = data.draw(st.sampled_from(sorted(o for o, values in wrong.items() if values)))
        chosen[option] = data.draw(st.sampled_from(wrong[option]))
        capfd.readouterr()
        assert ended(command, as_words(chosen, command.always)) == 2, chosen
        said = capfd.readouterr().err
        assert "error: " in said
        assert option in said or option.strip("-").upper() in said
        assert len(said) < 3000 + len(chosen[option])

    breaks()


def test_every_wrong_value_is_told(command: Command, capfd: pytest.CaptureFixture[str]) -> None:
    required = {o: v[0][0] for o, v in command.options.items() if not o.startswith("-")}
    for option, (_, wrong) in command.options.items():
        for value in wrong:
            assert ended(command, as_words({**required, option: value}, command.always)) == 2
            assert option in capfd.readouterr().err, value


WORDS = ["", "x", "-1", "--", "--odd", "--odd=1", "nan", "/dev/null/x", "\x00", "ä", "table", "-x"]


def test_words_at_random_are_refused(command: Command, capfd: pytest.CaptureFixture[str]) -> None:
    @fuzzed(8)
    @given(words=st.lists(st.sampled_from(WORDS), max_size=4))
    def breaks(words: list[str]) -> None:
        status = ended(command, words)
        # Some commands need no word, and pass on what they do not know.
        assert status in (None, 2)
        if status == 2:
            assert "error: " in capfd.readouterr().err

    breaks()
