"""Puts the examples on the path, as running them from their folder would."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
