"""Tensors that are frozen together: as many blocks as tensors, all of a block or none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyfreeze.policies.selection import (
    FreezeUnits,
    build_parameter_table,
    build_units,
    draw_uniform,
    frozen_ratio,
)

# An embedding, three blocks of 100 elements each, a norm and a head.
STAGE = [
    ("tok_embeddings.weight", 40),
    *[(f"layers.{i}.{name}", size) for i in (4, 5, 6) for name, size in [("w", 90), ("norm", 10)]],
    ("norm.weight", 5),
    ("output.weight", 40),
]
BLOCKS = [(1, 2), (3, 4), (5, 6)]


@pytest.fixture
def units() -> FreezeUnits:
    return build_units(build_parameter_table(STAGE), BLOCKS)


def test_a_block_is_one_unit_as_large_as_its_tensors(units: FreezeUnits) -> None:
    assert dict(zip(units.table.names, units.table.sizes.tolist(), strict=True)) == {
        "tok_embeddings.weight": 40,
        "layers.4.w": 100,
        "layers.5.w": 100,
        "layers.6.w": 100,
        "norm.weight": 5,
        "output.weight": 40,
    }


def test_masks_go_from_units_to_tensors_and_back(units: FreezeUnits) -> None:
    some = np.array([False, True, False, True, False, True])
    tensors = units.spread(some)
    assert tensors.tolist() == [False, True, True, False, False, True, True, False, True]
    assert units.gather(tensors).tolist() == some.tolist()


def test_a_block_that_is_frozen_in_part_is_named(units: FreezeUnits) -> None:
    mask = np.zeros(9, dtype=np.bool_)
    mask[3] = True
    with pytest.raises(ValueError, match=r"layers\.5\.norm is to stay live and other tensors"):
        units.gather(mask)


def test_tensors_that_are_never_frozen_do_not_count() -> None:
    exact = np.arange(9) == 0
    units = build_units(build_parameter_table(STAGE), BLOCKS, exact)
    some = np.array([True, False, True, False, True])
    assert units.gather(units.spread(some) | exact).tolist() == some.tolist()


def test_a_tensor_of_two_blocks_is_refused() -> None:
    table = build_parameter_table(STAGE)
    with pytest.raises(ValueError, match=r"layers\.4\.norm belongs to two compiled blocks"):
        build_units(table, [(1, 2), (2, 3)])


def test_without_blocks_draws_are_those_over_tensors() -> None:
    table = build_parameter_table(STAGE)
    units = build_units(table)
    for seed in range(20):
        alone = draw_uniform(table, 0.4, np.random.default_rng(seed))
        drawn = units.spread(draw_uniform(units.table, 0.4, np.random.default_rng(seed)))
        assert drawn.tolist() == alone.tolist()


@given(ratio=st.floats(0.01, 0.99), seed=st.integers(0, 10**6))
def test_a_draw_tears_no_block_and_misses_the_ratio_by_less_than_one_of_each_size(
    ratio: float, seed: int
) -> None:
    units = build_units(build_parameter_table(STAGE), BLOCKS)
    mask = units.spread(draw_uniform(units.table, ratio, np.random.default_rng(seed)))
    assert all(mask[a] == mask[b] for a, b in BLOCKS)
    assert abs(frozen_ratio(units.tensors, mask) - ratio) < (100 + 40 + 5) / 385 + 1e-9


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.8])
def test_every_tensor_is_frozen_with_the_ratio_as_its_probability(
    units: FreezeUnits, ratio: float
) -> None:
    rng = np.random.default_rng(0)
    n = 4000
    masks = np.stack([units.spread(draw_uniform(units.table, ratio, rng)) for _ in range(n)])
    margin = 4 * np.sqrt(ratio * (1 - ratio) / n)
    assert np.abs(masks.mean(axis=0) - ratio).max() < margin
    fractions = masks @ units.tensors.sizes / units.tensors.total
    assert fractions.mean() == pytest.approx(ratio, abs=margin)
