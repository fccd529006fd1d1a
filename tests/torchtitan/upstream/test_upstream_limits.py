"""What upstream cannot do, and is therefore refused at start; one that fails here can be allowed.

Two ranks are pretended: what fails does so before anything is sent.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor.experimental._attention import _disable_context_parallel_dispatcher
from torchtitan.config.job_config import Compile
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.llama3.infra.parallelize import apply_compile, apply_tp
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

from tests.timelyfreeze.helpers.stages import process_group


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    with process_group("fake", 2):
        # A name for each test: what torch keeps for an equal mesh would name groups of other tests.
        yield init_device_mesh("cpu", (2,), mesh_dim_names=(request.node.name,))


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [False, True])
def test_compiled_blocks_whose_tensors_are_split_have_no_backward(
    mesh: DeviceMesh, compiles: bool
) -> None:
    model = Transformer(
        TransformerModelArgs(
            dim=32, n_layers=1, n_heads=2, n_kv_heads=2, vocab_size=32, max_seq_len=8
        )
    )
    apply_tp(model, mesh, loss_parallel=False, enable_float8_tensorwise_tp=False)
    if compiles:
        apply_compile(model, Compile(enable=True, backend="aot_eager"))
    output = model(torch.zeros(1, 8, dtype=torch.long))
    if compiles:
        with pytest.raises(AttributeError, match="_local_tensor"):
            output.sum().backward()
    else:
        output.sum().backward()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_attention_over_several_processes_has_no_way_on_a_cpu(mesh: DeviceMesh) -> None:
    attention = ScaledDotProductAttentionWrapper()
    try:
        apply_cp_to_attention_module([attention], mesh, "sdpa")
        heads = torch.ones(1, 2, 4, 8, requires_grad=True)
        with pytest.raises(NotImplementedError, match=r"flash_attention_for_cpu.* no.* strategy"):
            attention(heads, heads, heads)
    finally:
        _disable_context_parallel_dispatcher()


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_torch_splits_no_backward_of_a_compiled_block(mesh: DeviceMesh, schedule: str) -> None:
    stages = [
        PipelineStage(
            nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")),
            index,
            4,
            torch.device("cpu"),
        )
        for index in ((0, 2) if schedule == "InterleavedZeroBubble" else (0, 3))
    ]
    with pytest.raises(RuntimeError, match=r"not supported with .* torch\.compile"):
        get_schedule_class(schedule)(stages, 4)
