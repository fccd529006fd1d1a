import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.timelyfreeze.helpers.stages import process_group
from timelyfreeze.runtime.meters.update_meter import Count, GradientEnergy


def tensors() -> list[Tensor]:
    """Squared norms 25, 4 and none."""
    found = [torch.zeros(2), torch.zeros(4), torch.zeros(3)]
    found[0].grad = torch.tensor([3.0, 4.0])
    found[1].grad = torch.ones(4)
    return found


def count(backwards: int, *frozen: int) -> Count:
    return Count(backwards, np.array(frozen))


def test_squared_norms_of_what_is_not_frozen() -> None:
    energy = GradientEnergy({0: tensors()[:2], 3: tensors()[2:]})
    assert not energy.is_complete
    energy.measure({0: count(4, 0, 0), 3: count(4, 0)})
    assert energy.energy[0].tolist() == [25.0, 4.0]
    assert energy.energy[3].tolist() == [0.0], "a tensor that has no gradient has no energy"
    assert energy.is_complete


def test_clipping_and_what_was_frozen_are_made_up_for() -> None:
    energy = GradientEnergy({0: tensors()})
    # The second was reached by 1 of 4 backwards: its gradient counts 4 times, its square 16 times.
    energy.measure({0: count(4, 0, 3, 0)}, scale=10.0)
    assert energy.energy[0].tolist() == pytest.approx([2500.0, 6400.0, 0.0])


def test_what_no_backward_reached_keeps_its_energy() -> None:
    energy = GradientEnergy({0: tensors()})
    energy.measure({0: count(4, 0, 4, 0)})
    assert math.isnan(energy.energy[0][1])
    energy.measure({0: count(4, 4, 0, 0)}, scale=3.0)
    assert energy.energy[0].tolist() == [25.0, 36.0, 0.0]


def test_a_new_measurement_counts_half() -> None:
    energy = GradientEnergy({0: tensors()})
    for scale in (1.0, 2.0, 4.0):
        energy.measure({0: count(1, 0, 0, 0)}, scale)
    # 4, 16, 64: (10 + 64) / 2
    assert energy.energy[0][1] == 37.0


def test_energies_come_back_from_a_checkpoint() -> None:
    energy, other = GradientEnergy({0: tensors()}), GradientEnergy({0: tensors()})
    energy.measure({0: count(4, 0, 4, 0)})
    other.load_plain_state(energy.plain_state())
    assert np.array_equal(other.energy[0], energy.energy[0], equal_nan=True)


def test_measured_energy_of_masked_microbatches_is_that_of_all_where_they_agree() -> None:
    """Four equal microbatches, of which three are frozen for the first layer."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    x = torch.randn(5, 3)
    for _ in range(4):
        layers(x).square().sum().backward()
    whole = [float(p.grad.double().square().sum()) for p in layers.parameters()]  # type: ignore[union-attr]
    layers.zero_grad()
    for m in range(4):
        live = list(layers.parameters() if m == 2 else layers[1].parameters())
        torch.autograd.backward(layers(x).square().sum(), inputs=live)
    energy = GradientEnergy({0: list(layers.parameters())})
    energy.measure({0: count(4, 3, 3, 0, 0)})
    assert energy.energy[0].tolist() == pytest.approx(whole, rel=1e-5)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_sharded_gradients_count_whole() -> None:
    torch.manual_seed(0)
    with process_group():
        module = nn.Linear(3, 2)
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        module(torch.randn(4, 3)).square().sum().backward()
        parameters = list(module.parameters())
        energy = GradientEnergy({0: parameters})
        energy.measure({0: count(1, 0, 0)})
        wanted = [float(p.grad.full_tensor().double().square().sum()) for p in parameters]
    assert energy.energy[0].tolist() == pytest.approx(wanted, rel=1e-5)
