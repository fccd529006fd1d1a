"""torchvision beside a torch that it was not built for; each test in a process of its own."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("torchvision") is None,
        reason="torchvision is not installed: the extra vision has it",
    ),
]

BEGIN = """
import sys
from timelyfreeze.cli import overlay
overlay.install()
"""
WITHOUT = """
sys.meta_path = [f for f in sys.meta_path if not isinstance(f, overlay._Finder)]
"""
USE = """
import torchvision
from torchvision.transforms import v2
assert v2.CenterCrop(2)(torchvision.tv_tensors.Image([[[1, 2, 3, 4]] * 4])).shape == (1, 2, 2)
"""


def run(*parts: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "".join(parts)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_torchvision_is_imported_whatever_torch_was_built_for() -> None:
    """By models of transformers too, which look for it themselves."""
    models = "from transformers import LlamaForCausalLM, ViTForImageClassification\n"
    if find_spec("transformers") is None:
        models = ""
    result = run(BEGIN, "overlay.install()\n", models, USE)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="torchvision fits a torch with CUDA")
def test_torchvision_of_the_index_still_cannot_be_imported_beside_a_torch_without_cuda() -> None:
    result = run(BEGIN, WITHOUT, USE)
    assert "operator torchvision::nms does not exist" in result.stderr
