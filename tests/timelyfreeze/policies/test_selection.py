import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyfreeze.policies.selection import (
    ParameterTable,
    build_parameter_table,
    draw_uniform,
    frozen_ratio,
    mask_rng,
)

BLOCK = {
    "attention.wq": 1024,
    "attention.wk": 256,
    "attention.wv": 256,
    "attention.wo": 1024,
    "feed_forward.w1": 3584,
    "feed_forward.w2": 3584,
    "feed_forward.w3": 3584,
    "attention_norm": 8,
    "ffn_norm": 8,
}
RATIOS = [0.03, 0.2, 0.37, 0.5, 0.8, 0.95]


def middle_stage(n_layers: int = 8) -> ParameterTable:
    """A Llama-shaped stage with the proportions of an 8B model."""
    return build_parameter_table(
        (f"layers.{layer}.{name}.weight", size)
        for layer in range(n_layers)
        for name, size in BLOCK.items()
    )


def last_stage() -> ParameterTable:
    """Two layers below a head that outweighs them."""
    sizes = dict(zip(middle_stage(2).names, middle_stage(2).sizes.tolist(), strict=True))
    return build_parameter_table({"output.weight": 32000, "norm.weight": 8, **sizes}.items())


def draws(table: ParameterTable, ratio: float, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([draw_uniform(table, ratio, rng) for _ in range(n)])


def chi_squared_quantile(degrees: int) -> float:
    """The 0.9999 quantile, by Wilson and Hilferty's approximation."""
    spread = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - spread + 3.719 * math.sqrt(spread)) ** 3


def chi_squared(hits: np.ndarray, ratio: float) -> float:
    n = len(hits)
    return float((((hits.sum(axis=0) - n * ratio) ** 2) / (n * ratio * (1 - ratio))).sum())


# --- the generator --------------------------------------------------------------------------------


def test_mask_rng_is_a_function_of_its_arguments() -> None:
    arguments = (3, 7, 1, 2, 5)
    once, again = (mask_rng(*arguments).random(50).tolist() for _ in range(2))
    assert once == again
    np.random.default_rng().random(10)
    assert mask_rng(*arguments).random(50).tolist() == once


def test_mask_rng_differs_in_every_argument() -> None:
    neighbours = [(3, 7, 1, 2, 5)]
    for i in range(5):
        for value in (0, 6, 100, 2**63):
            neighbours.append(tuple(value if j == i else x for j, x in enumerate(neighbours[0])))
    neighbours.append((7, 3, 1, 2, 5))
    neighbours.append((3, 7, 2, 1, 5))
    neighbours.append((3, 7, 1, 5, 2))
    streams = {tuple(mask_rng(*arguments).random(200).tolist()) for arguments in neighbours}
    assert len(streams) == len(neighbours)
    # Streams of neighbouring counters must not be shifts of each other either.
    values = [x for stream in streams for x in stream]
    assert len(set(values)) == len(values)


# --- the table ------------------------------------------------------------------------------------


def test_table_groups_by_size_then_role() -> None:
    table = build_parameter_table(
        [("layers.3.w1.weight", 10), ("a.w", 20), ("layers.12.w1.weight", 10), ("b.w", 10)]
    )
    assert table.classes == ((20, ((1,),)), (10, ((3,), (0, 2))))
    assert table.group == (2, 0, 2, 1)
    assert table.total == 50
    assert table.sizes.tolist() == [10, 20, 10, 10]


def test_table_refuses() -> None:
    with pytest.raises(ValueError, match="parameter 'a' is listed twice"):
        build_parameter_table([("a", 1), ("a", 2)])
    with pytest.raises(ValueError, match="parameter 'b' has 0 elements"):
        build_parameter_table([("a", 1), ("b", 0)])


def test_stage_without_parameters() -> None:
    table = build_parameter_table([])
    rng = np.random.default_rng(0)
    assert draw_uniform(table, 0.5, rng).tolist() == []
    assert frozen_ratio(table, np.zeros(0, dtype=bool)) == 0.0


def test_frozen_fraction_counts_elements() -> None:
    table = build_parameter_table([("a", 1), ("b", 3), ("c", 4)])
    assert frozen_ratio(table, np.array([True, False, True])) == 5 / 8


# --- the draws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("table", [middle_stage(3), last_stage()], ids=["middle", "last"])
def test_each_tensor_is_frozen_with_the_same_probability(
    table: ParameterTable, ratio: float
) -> None:
    hits = draws(table, ratio, 6000)
    assert chi_squared(hits, ratio) < chi_squared_quantile(len(table.names))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [(1, 1), (3, 1), (5, 2, 2), (5, 3, 1, 1), (2, 2, 1, 1, 1), (7, 3, 3, 3, 1)]
)
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
def test_probabilities_of_few_tensors(sizes: tuple[int, ...], ratio: float) -> None:
    # Few tensors of awkward sizes: every branch of the rounding is met often.
    table = build_parameter_table((f"p{i}", size) for i, size in enumerate(sizes))
    hits = draws(table, ratio, 20000)
    assert chi_squared(hits, ratio) < chi_squared_quantile(len(sizes))


def rounding_bound(table: ParameterTable) -> float:
    """Fraction of one tensor of each size: the most a draw may miss its ratio by."""
    return sum(set(table.sizes.tolist())) / table.total


@pytest.mark.parametrize("ratio", RATIOS)
def test_fraction_stays_near_the_ratio_at_every_draw(ratio: float) -> None:
    table = middle_stage()
    miss = np.abs(draws(table, ratio, 2000) @ table.sizes / table.total - ratio)
    assert miss.max() < rounding_bound(table)
    # Independent draws would miss by this much on average.
    independent = math.sqrt(ratio * (1 - ratio) * float((table.sizes**2).sum())) / table.total
    assert math.sqrt(float((miss**2).mean())) < 0.8 * independent


@pytest.mark.parametrize("ratio", [0.25, 0.37, 0.5, 0.75])
def test_fraction_misses_by_a_small_tensor_only(ratio: float) -> None:
    # Here the small tensors can always make up for the rounding of the large ones.
    table = middle_stage()
    miss = np.abs(draws(table, ratio, 2000) @ table.sizes / table.total - ratio)
    assert miss.max() < (BLOCK["attention.wq"] + BLOCK["attention.wk"] + 8) / table.total


@given(
    st.lists(st.sampled_from([1, 2, 3, 7, 50, 400]), min_size=1, max_size=30),
    st.floats(0.0, 1.0),
    st.integers(0, 2**32),
)
def test_any_sizes_and_ratio_stay_within_the_bound(
    sizes: list[int], ratio: float, seed: int
) -> None:
    table = build_parameter_table((f"p{i}", size) for i, size in enumerate(sizes))
    mask = draw_uniform(table, ratio, np.random.default_rng(seed))
    assert mask.shape == (len(sizes),)
    assert mask.dtype == np.bool_
    assert abs(frozen_ratio(table, mask) - ratio) <= rounding_bound(table) + 1e-12


def test_equal_tensors_are_counted_out() -> None:
    # Ten equal tensors: always five of them at 1/2, and three or four at 1/3.
    table = build_parameter_table((f"layers.{i}.w", 5) for i in range(10))
    hits = draws(table, 0.5, 500)
    assert set(hits.sum(axis=1).tolist()) == {5}
    thirds = draws(table, 1 / 3, 500)
    assert set(thirds.sum(axis=1).tolist()) == {3, 4}


def test_roles_fraction_the_freezing() -> None:
    # Three roles of the same size, eight tensors each: neither may freeze much more than its
    # fraction.
    table = middle_stage()
    hits = draws(table, 0.3, 1000)
    for role in ("w1", "w2", "w3"):
        members = [i for i, name in enumerate(table.names) if f".{role}." in name]
        counts = hits[:, members].sum(axis=1)
        assert counts.min() >= 1  # 8 x 0.3 = 2.4, less than 2 away
        assert counts.max() <= 4


def test_every_pair_can_be_frozen_together_and_apart() -> None:
    # Within a role the shuffle decides who meets whom; without it neighbours would never agree.
    table = build_parameter_table((f"layers.{i}.w", 5) for i in range(4))
    hits = draws(table, 0.5, 600)
    assert {tuple(row) for row in hits.tolist()} == {
        tuple(row)
        for row in ((np.arange(16)[:, None] >> np.arange(4)) & 1).astype(bool).tolist()
        if sum(row) == 2
    }


def test_ends_are_exact_and_leave_the_generator_alone() -> None:
    table = middle_stage(2)
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    assert not draw_uniform(table, 0.0, rng).any()
    assert draw_uniform(table, 1.0, rng).all()
    assert rng.bit_generator.state == before


def test_draws_do_not_touch_the_global_generators() -> None:
    before = np.random.get_state()[1].tolist()  # noqa: NPY002 - the legacy state is what is checked
    draw_uniform(middle_stage(1), 0.5, mask_rng(1, 2, 3, 4, 5))
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002
