"""NeMo AutoModel 0.7 on a machine without an accelerator, as far as its test needs it.

Usage: torchrun ... tests/examples/automodel_on_cpu.py --config FILE

Upstream asks torch.cuda for memory, device and random state from the first line of its setup on,
builds models on a GPU, and names a GPU to a barrier of gloo, which refuses that.
"""

import runpy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

torch.set_num_threads(1)
for name, answer in {
    "reset_peak_memory_stats": None,
    "max_memory_allocated": 0,
    "current_device": 0,
    "empty_cache": None,
    "get_rng_state_all": [],
    "set_rng_state_all": None,
}.items():
    setattr(torch.cuda, name, lambda *_, answer=answer: answer)

upstream_barrier = dist.barrier
dist.barrier = lambda group=None, device_ids=None: upstream_barrier(group)

from nemo_automodel._transformers import auto_model  # noqa: E402
from nemo_automodel.recipes.llm import train_ft  # noqa: E402


def on_cpu(upstream: Any, *args: Any, **kwargs: Any) -> Any:
    """Call it with the CPU as the device."""
    return upstream(*args, **{**kwargs, "device": torch.device("cpu")})


def told_of_a_cpu(upstream: Any, **kwargs: Any) -> Any:
    """Return who this process is; upstream names no device where there is no GPU."""
    found = upstream(**kwargs)
    found.device = torch.device("cpu")
    return found


for name in ("instantiate_infrastructure", "apply_model_infrastructure"):
    setattr(auto_model, name, partial(on_cpu, getattr(auto_model, name)))
train_ft.initialize_distributed = partial(told_of_a_cpu, train_ft.initialize_distributed)

if __name__ == "__main__":
    runpy.run_path("examples/automodel_recipe.py", run_name="__main__")
