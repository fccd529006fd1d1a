"""Lets torchvision be imported beside a torch without CUDA.

The package index has torchvision for CUDA alone. Beside another build of torch its operators cannot
be loaded, and its import fails, since two of them are described all the same. All models of
transformers then fail to import too. Both operators choose among boxes, unused here, so they are
declared as stubs.
"""

from contextlib import suppress
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

PACKAGE = "torchvision"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        import torch

        for library in Path(self.path).parent.glob("_C*.so"):
            with suppress(OSError):
                torch.ops.load_library(str(library))
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"{PACKAGE}::{name}", _SCHEMA)
        super().exec_module(module)


def declare_first(spec: ModuleSpec) -> None:
    """Declare operators missing in torchvision, before its import."""
    if isinstance(spec.loader, SourceFileLoader):
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
