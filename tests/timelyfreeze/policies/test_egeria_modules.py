"""Which blocks Egeria freezes together: its modules, by their sizes or by patterns."""

from __future__ import annotations

import pytest

from timelyfreeze.policies.egeria import block_groups
from timelyfreeze.policies.layout import ModelLayout, build_layout


def model(*stages: list[int]) -> ModelLayout:
    """A model with blocks of these sizes on each stage, an embedding and a head."""
    tensors: dict[int, list[tuple[str, int]]] = {}
    layer = 0
    for stage, sizes in enumerate(stages):
        tensors[stage] = [("embed", 1000)] if stage == 0 else []
        for size in sizes:
            tensors[stage] += [(f"layers.{layer}.w", size - 1), (f"layers.{layer}.norm", 1)]
            layer += 1
    tensors[len(stages) - 1].append(("head", 1000))
    return build_layout(tensors)


def groups(layout: ModelLayout, *patterns: str) -> list[tuple[int, int]]:
    return [(g.start, g.stop) for g in block_groups(layout, patterns)]


@pytest.mark.parametrize(
    ("stages", "wanted"),
    [
        ([[8, 8, 8]], [(0, 1), (1, 2), (2, 3)]),  # equal ones are modules
        ([[2, 3, 3, 8, 2]], [(0, 3), (3, 4), (4, 5)]),  # 2 + 3 + 3 is as much as the largest
        ([[2, 3, 4, 8]], [(0, 2), (2, 3), (3, 4)]),  # 2 + 3 + 4 is more
        ([[2], [3, 3], [8]], [(0, 1), (1, 3), (3, 4)]),  # stages are not put together
    ],
)
def test_neighbours_are_put_together_up_to_the_largest_block(
    stages: list[list[int]], wanted: list[tuple[int, int]]
) -> None:
    assert groups(model(*stages)) == wanted


def test_patterns_name_the_groups() -> None:
    layout = model([4, 4], [4, 4])
    assert groups(layout, r"layers\.[01]\.", r"layers\.[23]\.") == [(0, 2), (2, 4)]
    assert groups(layout, r"layers\.0\.", r"layers\.1\.", r"layers\.[^01]") == [
        (0, 1), (1, 2), (2, 4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ([r"layers\.0"], "none of its patterns are found in the names of block 1"),
        ([r"layers", r"\.0\."], r"'layers' and '\\\\.0\\\\.' are found in the names of block 0"),
        (
            [r"layers\.[02]", r"layers\.[13]"],
            "are no neighbours on one stage; block 2",
        ),
        (
            [r"layers\.[012]", r"layers\.3"],
            "are no neighbours on one stage; block 2",
        ),
    ],
)
def test_patterns_that_do_not_fit_are_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        groups(model([4, 4], [4, 4]), *patterns)
