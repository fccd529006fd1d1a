"""Writes ``durations.json``: how long each part of the suite took, and its longest tests.

Usage: python -m tests.tools.durations MACHINE, after scripts/test.sh and scripts/test.sh unit.
"""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests/tools/durations.json"
PARTS = ("unit", "one_process", "several_processes")
N_LONGEST = 200


def main(machine: str) -> None:
    """Read what pytest left of each part's last run."""
    parts, seconds = {}, {}
    for part in PARTS:
        (suite,) = ElementTree.parse(ROOT / f".pytest_cache/{part}.xml").iter("testsuite")
        parts[part] = {
            "tests": int(suite.attrib["tests"]), "seconds": round(float(suite.attrib["time"])),
        }  # fmt: skip
        for case in suite.iter("testcase"):
            name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
            seconds[name] = float(case.attrib["time"])
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:N_LONGEST]
    found = {"machine": machine, "parts": parts, "longest": dict(longest)}
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
