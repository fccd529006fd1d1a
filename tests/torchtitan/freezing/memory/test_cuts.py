"""Memory by the layers of a rank, some of them frozen, against the estimate of whole runs."""

import pytest
import torch

from tests.torchtitan.freezing.memory.test_estimate import config, kept
from torchtitan.freezing.memory.estimate import CutMemory, estimate_memory
from torchtitan.settings import stage_modules

pytestmark = pytest.mark.slow

N_LAYERS, SPLIT = 10, (2, 3, 3, 2)
ENDS = (2, 5, 8, 10)


def test_with_nothing_frozen_it_is_the_estimate_of_the_run() -> None:
    memory = CutMemory(config(), N_LAYERS)
    ranks = [memory.of_rank(r, ENDS[r] - SPLIT[r], ENDS[r]) for r in range(4)]
    assert tuple(len([m for m in stage if "layers" in m]) for stage in stages()) == SPLIT
    assert ranks == estimate_memory(config())
    assert memory.of_fullest(SPLIT) == max(rank.total for rank in ranks)


def stages() -> list[list[str]]:
    return stage_modules(config(), N_LAYERS)


@pytest.mark.parametrize(
    ("n_frozen", "live"), [(0, [1, 1, 1, 1]), (3, [0, 2 / 3, 1, 1]), (8, [0, 0, 0, 1])]
)
def test_a_frozen_front_has_weights_and_moments_alone(n_frozen: int, live: list[float]) -> None:
    memory = CutMemory(config(), N_LAYERS)
    before = estimate_memory(config())
    ranks = [memory.of_rank(r, ENDS[r] - SPLIT[r], ENDS[r], n_frozen) for r in range(4)]
    for now, then, share in zip(ranks, before, live, strict=True):
        assert (now.parameters, now.optimizer) == (then.parameters, then.optimizer)
        assert now.gradients == pytest.approx(share * then.gradients)
        assert (now.activations > 0) == (share > 0)


def test_a_stage_keeps_no_microbatch_of_its_frozen_layer() -> None:
    """The second of four stages holds three microbatches at once."""
    memory = CutMemory(config(), N_LAYERS)
    fewer = memory.of_rank(1, 2, 5).activations - memory.of_rank(1, 2, 5, 3).activations
    assert fewer == 3 * kept(torch.float32, None).layer.kept
