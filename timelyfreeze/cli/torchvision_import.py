"""Lets torchvision be imported beside a torch without CUDA.

The package index has torchvision for CUDA alone. Beside another build of torch its operators cannot
be loaded, and its import fails, since it describes two of them all the same; with it fail those of
all models of transformers, which look whether torchvision is installed. These two choose among
boxes, which nothing here does. So they are declared, without anything behind.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

PACKAGE = "torchvision"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")
_declared: list[str] = []


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        _declare_operators(Path(self.path).parent)
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds torchvision as Python does, and sees to its operators when it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _declare_operators(folder: Path) -> None:
    """Declare what torchvision describes, if the library in its folder cannot be loaded."""
    import torch

    for library in folder.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            missing = [name for name in _OPERATORS if name not in _declared]
            _declared.extend(missing)
            for name in missing:
                torch.library.define(f"{PACKAGE}::{name}", _SCHEMA)


def install() -> None:
    """Look after an import of torchvision to come; calling it again does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
