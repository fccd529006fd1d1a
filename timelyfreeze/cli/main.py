"""The map of the product: every command, and its module."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

from timelyfreeze.cli import overlay
from timelyfreeze.cli.train import DEFAULTS


@dataclass(frozen=True)
class Command:
    """A command: its module, with ``main(arguments)``, and its summary."""

    module: str
    summary: str
    extra: str = "titan"


COMMANDS = {
    "train": Command("timelyfreeze.cli.train", "train with a TOML file over a pipeline"),
    "doctor": Command("timelyfreeze.cli.doctor.command",
                      "what is wrong with this host and its ranks", extra=""),
    "estimate": Command("torchtitan.freezing.estimate",
                        "what each rank's memory will hold; no GPU needed"),
    "samples": Command("torchtitan.freezing.samples", "what the model reads, and what it learns"),
    "profile": Command("torchtitan.freezing.profile.command",
                       "time each stage of a pipeline alone on one device"),
    "plan": Command("timelyfreeze.cli.plan", "from measured times: what freezing brings for any "
                    "schedule, cap, split or front", extra=""),
    "draw": Command("timelyfreeze.plots.drawing", "plots and traces of a run", extra="plots"),
    "compare": Command("timelyfreeze.compare.command",
                       "run methods side by side; show what runs say", "plots"),
    "paper": Command("timelyfreeze.compare.paper.command",
                     "each table and figure of the paper", "plots"),
    "export": Command("torchtitan.vision.export_command",
                      "a run's weights as a Hugging Face folder"),
    "evaluate": Command("torchtitan.evaluation.command",
                        "scores of a run or a folder, with lm-eval", extra="eval"),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named by ``arguments`` and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read it, such as head, has enough; Python would tell at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as interrupt:
        print(f"\n{str(interrupt) or 'Interrupted'}", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"timelyfreeze {version('timelyfreeze')}")
        return 0
    if words[0] not in COMMANDS:
        print(f"error: {words[0]!r} is no command\n\n{usage()}", file=sys.stderr)
        return 2
    command = COMMANDS[words[0]]
    overlay.install()  # also where the project is not installed
    os.environ.update({**DEFAULTS, **os.environ})
    split = words.index("--") if "--" in words else len(words)
    asks_for_help = {"-h", "--help"} & {*words[:split]}
    try:
        with overlay.without_release() if asks_for_help else nullcontext():
            run: Callable[[Sequence[str]], int] = import_module(command.module).main
            return run(words[1:])
    except ModuleNotFoundError as error:
        missing = (error.name or "timelyfreeze").split(".")[0]
        if missing == "timelyfreeze":
            raise
        print(
            f"error: timelyfreeze {words[0]} needs {missing}, which is not installed: "
            f'pip install "timelyfreeze[{command.extra}]"',
            file=sys.stderr,
        )
        return 2


def usage() -> str:
    """Return the map of the product."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.summary}\n" for name, command in COMMANDS.items()]
    return (
        "usage: timelyfreeze COMMAND ...\n\n"
        "Fine-tune over a pipeline, and freeze where the schedule says that it pays.\n\n"
        f"{''.join(lines)}\n"
        "timelyfreeze COMMAND --help tells the options of a command."
    )
