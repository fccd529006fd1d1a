"""Share of pointing words in docstrings: `python -m tests.tools.words [FOLDER ...]`.

A docstring names its subject by a noun or a verb of the field, not by "what it does".
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("timelyfreeze", "torchtitan")
POINTING = ("what", "it", "that", "those", "one", "each", "which")
_WORD = re.compile(r"[a-z']+")
_HAVE_DOCSTRINGS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _HAVE_DOCSTRINGS) and (text := ast.get_docstring(node)) is not None:
            yield text


def pointing_share(sources: Sequence[str]) -> float:
    """Return the share of pointing words in the words of all docstrings; 0 without words."""
    texts = [text for source in sources for text in docstrings(source)]
    counts = Counter(word for text in texts for word in _WORD.findall(text.lower()))
    return sum(counts[word] for word in POINTING) / max(1, counts.total())


def sources_of(folder: Path) -> list[str]:
    """Return the Python files in and below a folder."""
    return [path.read_text() for path in sorted(folder.rglob("*.py"))]


if __name__ == "__main__":
    for name in sys.argv[1:] or PACKAGES:
        print(f"{100 * pointing_share(sources_of(ROOT / name)):.2f}% {name}")
