"""Puts this project's part of ``torchtitan`` beside the installed release's.

Both are one package: a module that the release does not have is ours. A wheel puts ours into the
same folder. Where the project runs from its own folder (an editable install, a clone), the folder
``torchtitan`` beside this package is added to the release's search path, whatever the current
folder or ``PYTHONPATH`` is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from timelyfreeze.cli import torchvision_import

RELEASE = "torchtitan"
OURS = str(Path(__file__).resolve().parents[2] / RELEASE)


class _Finder(MetaPathFinder):
    """Finds the release as Python does, and adds our folder to where its modules are looked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != RELEASE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        # Without a loader it is no release, only folders of that name.
        if spec is not None and spec.loader is not None:
            _extend(spec.submodule_search_locations)
        return spec


def _extend(folders: list[str] | None) -> None:
    if folders is not None and OURS not in folders:
        folders.append(OURS)


def install() -> None:
    """Make ``torchtitan.freezing`` importable; calling it again does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if RELEASE in sys.modules:
        _extend(sys.modules[RELEASE].__path__)  # type: ignore[arg-type]
    torchvision_import.install()  # in every process: transformers import it too
