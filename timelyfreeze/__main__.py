"""Entry point: ``python -m timelyfreeze COMMAND ...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from timelyfreeze.plots.command import add_draw_command
from timelyfreeze.whatif.command import add_plan_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m timelyfreeze", description="TimelyFreeze without training."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_plan_command(commands)
    add_draw_command(commands)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
