"""One process in the shape of a pipeline: its dimensions, and norms added up rank by rank."""

import numpy as np
import pytest
import torch
import torchtitan.distributed.utils as titan_dist
from torch import nn
from torchtitan.distributed import ParallelDims

from torchtitan.freezing.emulation.pipeline import (
    EmulatedDims,
    EmulatedMesh,
    LoneDims,
    parts_of_ranks,
)
from torchtitan.upstream import fixes as upstream_fixes


@pytest.fixture(autouse=True, scope="module")
def _one_process(one_rank: None) -> None:
    upstream_fixes.install()


def world(**degrees: int) -> ParallelDims:
    ones = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1)
    return ParallelDims(**{**ones, **degrees}, world_size=1)


def make_parts(n: int, seed: int = 0) -> list[nn.Module]:
    """Modules with gradients of very different sizes, so that the order of a sum shows."""
    torch.manual_seed(seed)
    parts = [nn.Linear(7, 5 + i) for i in range(n)]
    for i, part in enumerate(parts):
        for parameter in part.parameters():
            parameter.grad = torch.randn_like(parameter) * 10.0 ** (i % 3)
    return parts


def parameters_of(parts: list[nn.Module]) -> list[nn.Parameter]:
    return [p for part in parts for p in part.parameters()]


# -- dimensions ------------------------------------------------------------------------------------


def test_the_world_is_one_process_and_the_pipeline_is_on() -> None:
    dims = EmulatedDims.of(world())
    assert dims.pp_enabled
    assert (dims.pp, dims.world_size, dims.non_data_parallel_size) == (1, 1, 1)
    assert not any((dims.dp_enabled, dims.tp_enabled, dims.cp_enabled, dims.fsdp_enabled))


def test_a_pipeline_of_one_rank_has_a_mesh_and_other_dimensions_of_one_have_none() -> None:
    dims = LoneDims.of(world())
    assert dims.pp_enabled
    assert dims.get_mesh("pp").size() == 1
    assert dims.get_optional_mesh("tp") is None


def test_the_pipelines_mesh_is_asked_for_in_every_way_upstream_does() -> None:
    dims = EmulatedDims.of(world())
    mesh = dims.get_mesh("pp")
    assert mesh is dims.get_optional_mesh("pp") is dims.get_optional_mesh(["pp"]) is dims.pipeline
    assert (mesh.size(), mesh.get_local_rank()) == (1, 0)
    assert torch.distributed.get_world_size(mesh.get_group("pp")) == 1
    assert dims.get_optional_mesh("tp") is None
    assert dims.get_optional_mesh(["dp_replicate", "fsdp"]) is None
    with pytest.raises(ValueError, match="tp"):
        dims.get_mesh("tp")


def test_a_left_over_shard_degree_is_one() -> None:
    assert EmulatedDims.of(world(dp_shard=-1)).dp_shard == 1


def test_stages_go_to_the_ranks_that_would_hold_them() -> None:
    parts = make_parts(6)
    looped = parts_of_ranks(parts, [0, 1, 2, 0, 1, 2])
    assert looped == [[parts[0], parts[3]], [parts[1], parts[4]], [parts[2], parts[5]]]
    in_v = parts_of_ranks(parts, [0, 1, 2, 2, 1, 0])
    assert in_v == [[parts[0], parts[5]], [parts[1], parts[4]], [parts[2], parts[3]]]


# -- clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage_to_rank", [[0, 1, 2, 3], [0, 1, 1, 0], [0, 1, 0, 1]])
def test_the_norm_is_that_of_all_gradients(stage_to_rank: list[int]) -> None:
    parts = make_parts(4)
    mesh = EmulatedMesh()
    mesh.place(parts, stage_to_rank)
    parameters = parameters_of(parts)
    flat = np.concatenate([p.grad.double().numpy().ravel() for p in parameters])  # type: ignore
    before = [p.grad.clone() for p in parameters]  # type: ignore[union-attr]
    norm = titan_dist.clip_grad_norm_(parameters, 2.5, foreach=True, pp_mesh=mesh)
    assert float(norm) == pytest.approx(np.linalg.norm(flat), rel=1e-6)
    for parameter, gradient in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * (2.5 / float(norm)))


def test_the_norm_is_rounded_where_ranks_round_it() -> None:
    """Squares are added in float32 from the last rank to the first, not over all tensors."""
    differs = 0
    for seed in range(30):
        parts = make_parts(4, seed)
        mesh = EmulatedMesh()
        mesh.place(parts, [0, 1, 2, 3])
        norms = [torch.nn.utils.get_total_norm([p.grad for p in m.parameters()]) for m in parts]
        n0, n1, n2, n3 = (np.float32(norm.item()) ** np.float32(2) for norm in norms)
        # torch's power of one half rounds otherwise than a square root.
        wanted, forwards = (
            torch.tensor(square) ** 0.5 for square in (n0 + (n1 + (n2 + n3)), ((n0 + n1) + n2) + n3)
        )
        got = mesh.clip_grad_norm_(parameters_of(parts), 1e9)
        assert torch.equal(got, wanted)
        differs += not torch.equal(got, forwards)
    assert differs, "another order must be seen to differ, or this test shows nothing"


def test_gradients_below_the_limit_stay_as_they_are() -> None:
    parts = make_parts(2)
    mesh = EmulatedMesh()
    mesh.place(parts, [0, 1])
    before = [p.grad.clone() for p in parameters_of(parts)]  # type: ignore[union-attr]
    mesh.clip_grad_norm_(parameters_of(parts), 1e9)
    after = [p.grad for p in parameters_of(parts)]
    assert all(map(torch.equal, after, before))  # type: ignore[arg-type]


def test_ranks_without_gradients_bring_nothing() -> None:
    parts = make_parts(3)
    for parameter in parts[1].parameters():
        parameter.grad = None
    mesh = EmulatedMesh()
    mesh.place(parts, [0, 1, 2])
    live = [p.grad for m in (parts[0], parts[2]) for p in m.parameters()]
    norm = mesh.clip_grad_norm_(parameters_of(parts), 1e9)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(live))  # type: ignore
    for parameter in parameters_of(parts):
        parameter.grad = None
    assert mesh.clip_grad_norm_(parameters_of(parts), 1e9).item() == 0.0
