"""Makes figures of the pages again: python -m benchmarks.claims [NAME ...].

``claims.toml`` has a table for each: the words of the page, the command (or the name of one that
several claims share), how its output tells the figure, and what that must be. A command runs in the
project's folder and may use {python} and variables of the environment; ``needs`` names variables
without which it cannot run.
"""

import argparse
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "benchmarks" / "claims.toml"


@dataclass(frozen=True)
class Claim:
    """A figure of a page, and how to make it."""

    words: str  # as they stand in README.md or docs/results.md
    command: str
    find: str  # a pattern whose only group is the figure in the last line of the output that has it
    value: float
    tolerance: float  # how far the figure may be from the value, in its unit
    minutes: float  # on two cores, or on the GPU
    memory_gib: float
    gpu: bool = False
    needs: list[str] = field(default_factory=list)

    @property
    def obstacle(self) -> str | None:
        """What the machine lacks."""
        lacking = [name for name in self.needs if name not in os.environ]
        if lacking:
            return f"set {', '.join(lacking)}"
        if self.gpu:
            import torch

            return None if torch.cuda.is_available() else "it needs a GPU"
        return None

    def verdict(self, output: str) -> tuple[bool, str]:
        """Return whether the claim holds, and the sentence that says so."""
        expected = f"{self.value:g} ± {self.tolerance:g}"
        figures = re.findall(self.find, output, re.M)
        if not figures:
            return False, f"does not hold: no figure in the output (expected {expected})"
        found = float(figures[-1].replace(",", ""))
        # Rounding of decimals must not decide.
        holds = abs(found - self.value) <= self.tolerance + 1e-9
        return holds, f"{'holds' if holds else 'does not hold'}: {found:g} (expected {expected})"


def read(path: Path = FILE) -> dict[str, Claim]:
    """Return the claims by name; TypeError for keys that a claim has not."""
    tables = tomllib.loads(path.read_text())
    commands = tables.pop("commands", {})
    for table in tables.values():
        table["command"] = commands.get(table["command"], table["command"])
        for name, text in commands.items():  # a command may name another as its part
            table["command"] = table["command"].replace(f"{{{name}}}", text)
    return {name: Claim(**table) for name, table in tables.items()}


def run(command: str, outputs: dict[str, str]) -> str:
    """Return what a command says; several claims of one command run it once."""
    if command not in outputs:
        done = subprocess.run(
            ["bash", "-c", command.replace("{python}", sys.executable)],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        outputs[command] = done.stdout if done.returncode == 0 else ""
        if done.returncode:
            print(f"exit status {done.returncode}: {done.stdout[-1000:]}", file=sys.stderr)
    return outputs[command]


def check(claims: Mapping[str, Claim]) -> int:
    """Run claims and say of each whether it holds; return how many do not."""
    outputs: dict[str, str] = {}
    n_broken = 0
    for name, claim in claims.items():
        if (why := claim.obstacle) is not None:
            print(f"{name}: not run: {why}")
            continue
        begun = time.monotonic()
        holds, text = claim.verdict(run(claim.command, outputs))
        n_broken += not holds
        print(f"{name}: {text}; {time.monotonic() - begun:.0f} s", flush=True)
    return n_broken


def main(arguments: list[str] | None = None) -> int:
    """Check claims by name, or all; return 1 where one does not hold."""
    parser = argparse.ArgumentParser(prog="benchmarks.claims", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--file", type=Path, default=FILE, help="default: %(default)s")
    parser.add_argument(
        "--within", type=float, metavar="MINUTES", help="only what takes less, without a GPU"
    )
    options = parser.parse_args(arguments)
    claims = read(options.file)
    if unknown := sorted(set(options.names) - set(claims)):
        parser.error(f"{', '.join(unknown)} is no claim; known: {', '.join(claims)}")
    chosen = {n: claim for n, claim in claims.items() if not options.names or n in options.names}
    if options.within is not None:
        chosen = {
            n: claim
            for n, claim in chosen.items()
            if claim.minutes < options.within and not claim.gpu
        }
    return int(check(chosen) > 0)


if __name__ == "__main__":
    sys.exit(main())
