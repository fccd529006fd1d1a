"""The profile on a GPU. Run with ``scripts/gpu_checks.sh``; skipped where there is none."""

from dataclasses import replace

import pytest
import torch

from torchtitan.freezing.profile.bench import Repeats
from torchtitan.freezing.profile.profile import profile_stages
from torchtitan.settings.job_config import job_config_class
from torchtitan.upstream import fixes as upstream_fixes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_stages_are_measured_on_the_device_and_let_go():
    upstream_fixes.install()
    config = job_config_class()()
    config.model.name, config.model.flavor = "llama3", "debugmodel"
    config.training.local_batch_size, config.training.seq_len = 8, 64
    config.training.mixed_precision_param = "bfloat16"
    config.parallelism.pipeline_parallel_degree = 3
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.parallelism.pipeline_parallel_microbatch_size = 2
    config.activation_checkpoint.mode = "none"
    config.freezing = replace(config.freezing, gradient_rank=0)
    before = torch.cuda.memory_allocated()
    found = profile_stages(config, Repeats((0.0, 0.5, 1.0), cold=1, kept=2), lambda response: None)
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert min(found.peak_bytes) > 0
    assert found.n_processors is None
    for response in found.responses:
        assert min(response.forward_ms) > 0.0
        for points in response.curves.values():
            assert {len(point.times_ms) for point in points} == {2}
