"""Which front is frozen whole, and what tells it from others."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from timelyfreeze.front.caching.front import digests, fingerprint, front_of, token_digest
from timelyfreeze.policies import build_layout

# Three stages: embedding and two blocks; two blocks; one block, norm and head.
STAGES = {
    0: ["embedding.weight", "layers.0.a", "layers.0.b", "layers.1.a"],
    1: ["layers.2.a", "layers.3.a"],
    2: ["layers.4.a", "norm.weight", "output.weight"],
}
LAYOUT = build_layout({stage: [(name, 2) for name in names] for stage, names in STAGES.items()})
PARAMETERS = {name: torch.full((2,), float(i)) for i, name in enumerate(LAYOUT.names)}


def frozen(*live: str) -> np.ndarray:
    return np.array([name not in live for name in LAYOUT.names])


@pytest.mark.parametrize(
    ("first_live", "expected"),
    [
        ("embedding.weight", None),
        ("layers.0.b", None),
        ("layers.1.a", (1, 0, 1)),
        ("layers.2.a", (2, 1, 0)),
        ("layers.3.a", (3, 1, 1)),
        ("layers.4.a", (4, 2, 0)),
        ("norm.weight", (5, 2, 1)),
    ],
)
def test_a_front_ends_before_the_first_block_with_a_live_tensor(
    first_live: str, expected: tuple[int, int, int] | None
) -> None:
    front = front_of(LAYOUT, frozen(first_live, "output.weight"))
    found = None if front is None else (front.depth, *front.end)
    assert found == expected


def test_a_model_that_is_frozen_whole_has_no_front() -> None:
    assert front_of(LAYOUT, frozen()) is None


def test_a_hole_in_the_front_ends_it() -> None:
    front = front_of(LAYOUT, frozen("layers.0.b"))
    assert front is None


def named(parameters: dict[str, torch.Tensor], identity: str = "model") -> str:
    front = front_of(LAYOUT, frozen("layers.2.a"))
    assert front is not None
    return fingerprint(front, [digests(front.names, parameters)], identity)


def test_a_fingerprint_follows_every_tensor_of_the_front_and_no_other() -> None:
    for name in LAYOUT.names:
        changed = {key: value.clone() for key, value in PARAMETERS.items()}
        changed[name][1] += 1e-3
        is_in_front = LAYOUT.layers[LAYOUT.names.index(name)] < 2
        assert (named(changed) != named(PARAMETERS)) == is_in_front
    assert named(PARAMETERS, "another model") != named(PARAMETERS)
    assert named({k: v.double() for k, v in PARAMETERS.items()}) != named(PARAMETERS)


def test_ranks_tell_digests_of_what_they_hold() -> None:
    front = front_of(LAYOUT, frozen("layers.3.a"))
    assert front is not None
    held = {name: PARAMETERS[name] for name in STAGES[1]}
    assert list(digests(front.names, held)) == ["layers.2.a"]


def test_a_fingerprint_is_that_of_the_front_however_its_ranks_are() -> None:
    """One rank with all of it; two stages; replicas of them, of which each tells all it holds."""
    front = front_of(LAYOUT, frozen("layers.3.a"))
    assert front is not None
    held = [{name: PARAMETERS[name] for name in STAGES[stage]} for stage in (0, 1)]
    told = [digests(front.names, of_stage) for of_stage in held]
    whole = fingerprint(front, [digests(front.names, PARAMETERS)], "model")
    assert whole == fingerprint(front, told, "model")
    assert whole == fingerprint(front, [*told, *told], "model")
    # Where a block is cut in half, its tensors come in another order.
    assert whole == fingerprint(replace(front, names=front.names[::-1]), told, "model")
    changed = digests(front.names, {**held[1], "layers.2.a": torch.zeros(2)})
    assert whole != fingerprint(front, [*told, told[0], changed], "model")
    with pytest.raises(ValueError, match=r"no rank has 'layers\.2\.a' of the frozen front"):
        fingerprint(front, told[:1], "model")


def test_rows_with_other_tokens_have_other_digests() -> None:
    tokens = torch.arange(6)
    assert token_digest(tokens) == token_digest(tokens.clone())
    assert token_digest(tokens) != token_digest(tokens.flip(0))
    assert token_digest(torch.stack([tokens, tokens], dim=1)[:, 0]) == token_digest(tokens)
