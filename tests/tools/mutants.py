"""Small faults, put into the product one at a time: does a test fail for each?

Usage: python -m tests.tools.mutants [WORD ...]    those whose name or file has one of the words

``mutants.toml`` lists them, each with the tests that should see it. They run in a copy of the
tracked files, so that nothing here changes. A mutant is caught if its tests run and one of them
fails, which at the end has to pass in the same copy without the mutant.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CAUGHT, SURVIVED, BROKEN = "caught", "SURVIVED", "BROKEN"
# What pytest's exit status says of a mutant; by any other the tests did not run.
VERDICTS = {0: SURVIVED, 1: CAUGHT}
TIME_LIMIT_S = 600.0


class Mutant(NamedTuple):
    """A fault.

    Attributes:
        name: Tells it from others.
        claim: How the row of the table in CONTRIBUTING.md begins that it would break.
        file: Where it is.
        old: What stands there, once.
        new: What the fault has in its place.
        tests: Files and folders with the tests that should see it.
    """

    name: str
    claim: str
    file: str
    old: str
    new: str
    tests: list[str]

    def put_into(self, text: str) -> str:
        """Return the file's text with the fault."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: its old text stands {text.count(self.old)} times there")
        return text.replace(self.old, self.new)


def read_mutants() -> list[Mutant]:
    """Return all mutants, in the order of their file."""
    listed = tomllib.loads((ROOT / "tests/tools/mutants.toml").read_text())["mutant"]
    return [Mutant(**values) for values in listed]


def chosen(mutants: Sequence[Mutant], words: Sequence[str]) -> list[Mutant]:
    """Return the mutants that one of the words is about; all without any."""
    return [
        m for m in mutants if not words or any(word in m.name or word in m.file for word in words)
    ]


def copy_tracked(folder: Path) -> set[Path]:
    """Copy what git tracks, as it is in the working tree; return the files."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # not one that was deleted and is tracked still
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return {path for path in folder.rglob("*") if path.is_file()}


def drop_leftovers(folder: Path, copied: set[Path]) -> None:
    """Delete what a mutant's tests have left behind, for which others would fail; not Python's."""
    for path in folder.rglob("*"):
        if path.is_file() and path not in copied and path.suffix != ".pyc":
            path.unlink()


@contextmanager
def mutated(mutant: Mutant, folder: Path) -> Iterator[None]:
    """Have the fault in the copy; its old time comes back too, by which Python knows its code."""
    file = folder / mutant.file
    text, times = file.read_text(), file.stat()
    file.write_text(mutant.put_into(text))
    try:
        yield
    finally:
        file.write_text(text)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def run_tests(tests: Sequence[str], folder: Path) -> tuple[int | None, str]:
    """Run tests in the copy; return pytest's exit status, None out of time, and what it said."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    # Whatever the tests start imports from the copy too. With CI, examples are the same each time.
    environment = {**os.environ, "PYTHONPATH": str(folder), "CI": "true"}
    process = subprocess.Popen(
        [*command, "-m", "not long and not gpu", *tests],
        cwd=folder,
        env={"OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=TIME_LIMIT_S)[0]
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        said = process.communicate()[0]
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return None, said
    return process.returncode, said


def first_failure(said: str) -> str | None:
    """Return the first test that pytest's summary names as failed."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+::\w+(?:\[.*?\](?= - |$))?)", said, re.MULTILINE)
    return None if found is None else found[1]


def verdict_of(mutant: Mutant, folder: Path) -> tuple[str, str | None]:
    """Return what became of a mutant, and the test that has seen it."""
    with mutated(mutant, folder):
        status, said = run_tests(mutant.tests, folder)
    verdict = VERDICTS.get(-1 if status is None else status, BROKEN)
    if verdict == BROKEN:
        print(said[-2000:], "out of time" if status is None else f"status {status}", sep="\n")
    return verdict, first_failure(said) if verdict == CAUGHT else None


def main(words: Sequence[str]) -> int:
    """Try mutants, a line for each; return 1 if one was not caught."""
    mutants = chosen(read_mutants(), words)
    if not mutants:
        print(f"no mutant's name or file has one of: {', '.join(words)}", file=sys.stderr)
        return 2
    counts: Counter[str] = Counter()
    seen_by: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        folder = Path(place)
        copied = copy_tracked(folder)
        for mutant in mutants:
            started = time.monotonic()
            verdict, test = verdict_of(mutant, folder)
            drop_leftovers(folder, copied)
            seconds = time.monotonic() - started
            counts[verdict] += 1
            seen_by += [test] if test else []
            line = f"{verdict:8} {seconds:6.1f} s  {mutant.name}  {mutant.file}  {test or ''}"
            print(line.rstrip(), flush=True)
        status, said = run_tests(seen_by, folder) if seen_by else (0, "")
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    if status != 0:
        print(f"{said}\nwithout any mutant too: {first_failure(said)}")
    return int(status != 0 or counts[CAUGHT] < len(mutants))


if __name__ == "__main__":
    # Whoever ends it ends the tests too, and leaves no copy behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
