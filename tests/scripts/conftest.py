"""Tests of command lines import scripts as these find each other: from their folders."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests/multiprocess/helpers")]
