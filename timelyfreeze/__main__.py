"""Entry point: ``python -m timelyfreeze COMMAND ...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from timelyfreeze.plots.command import add_draw_command
from timelyfreeze.whatif import command as plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name and return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["plan"]:
        return plan.main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m timelyfreeze", description="TimelyFreeze without training."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_draw_command(commands)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
