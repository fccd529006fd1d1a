"""Puts this project's part of ``torchtitan`` beside the installed release's.

Both make a package: modules missing in the release are ours. A wheel puts ours into the same
folder. Where the project runs from its own folder (an editable install, a clone), the folder
``torchtitan`` beside this package is added to the release's search path, whatever the current
folder or ``PYTHONPATH`` is.

It also lets torchvision be imported beside a torch without CUDA. The package index has torchvision
for CUDA alone. Beside another build of torch its operators cannot be loaded, and its import fails,
since two of them are described all the same. All models of transformers then fail to import too.
Both operators choose among boxes, unused here, so they are declared as stubs.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

RELEASE = "torchtitan"
OURS = str(Path(__file__).resolve().parents[2] / RELEASE)
_TORCHVISION = "torchvision"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _add_ours(spec: ModuleSpec) -> None:
    # Without a loader it is no release, only folders of that name.
    if spec.loader is not None:
        _extend(spec.submodule_search_locations)


def _extend(folders: list[str] | None) -> None:
    if folders is not None and OURS not in folders:
        folders.append(OURS)


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        import torch

        for library in Path(self.path).parent.glob("_C*.so"):
            with suppress(OSError):
                torch.ops.load_library(str(library))
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"{_TORCHVISION}::{name}", _SCHEMA)
        super().exec_module(module)


def _declare_first(spec: ModuleSpec) -> None:
    """Declare operators missing in torchvision, before its import."""
    if isinstance(spec.loader, SourceFileLoader):
        spec.loader = _Loader(spec.loader.name, spec.loader.path)


_CHANGES = {RELEASE: _add_ours, _TORCHVISION: _declare_first}


class _Finder(MetaPathFinder):
    """Finds packages as Python does, and changes their spec before the import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _CHANGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            _CHANGES[fullname](spec)
        return spec


@contextmanager
def without_release() -> Iterator[None]:
    """Import our modules without the release's own imports, which take seconds.

    For the options of a command. Later imports find the release again.
    """
    if RELEASE in sys.modules:
        yield
        return
    bare = ModuleType(RELEASE)
    spec = PathFinder.find_spec(RELEASE)
    bare.__path__ = [OURS, *((spec and spec.submodule_search_locations) or ())]
    sys.modules[RELEASE] = bare
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == RELEASE]:
            del sys.modules[name]


def install() -> None:
    """Make ``torchtitan.freezing`` importable; idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if RELEASE in sys.modules:
        _extend(sys.modules[RELEASE].__path__)  # type: ignore[arg-type]
