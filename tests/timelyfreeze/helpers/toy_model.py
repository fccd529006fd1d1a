"""A model for the tests of policies, and the few lines that take a policy through its checks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from timelyfreeze.policies.layout import ModelLayout, build_layout
from timelyfreeze.policies.policy import Check, Decision, FreezePolicy, Metric

TENSORS_OF_BLOCK = {"attention.wq": 16, "attention.wo": 16, "feed_forward.w1": 40}
SHARES = (0.5, 0.3, 0.2)  # of a block's sum of squares, so that a test sees who forgets a tensor
N_AROUND = 3  # embedding in front; final norm and head behind


def toy_layout(n_layers: int, n_stages: int = 2) -> ModelLayout:
    """Embedding, blocks of three tensors, final norm and head, spread over the stages."""
    stages: dict[int, list[tuple[str, int]]] = {stage: [] for stage in range(n_stages)}
    stages[0].append(("tok_embeddings.weight", 80))
    for layer in range(n_layers):
        stages[layer * n_stages // n_layers] += [
            (f"layers.{layer}.{name}.weight", size) for name, size in TENSORS_OF_BLOCK.items()
        ]
    stages[n_stages - 1] += [("norm.weight", 4), ("output.weight", 80)]
    return build_layout(stages)


def of_tensors(norms: Sequence[float], around: float = 77.0) -> np.ndarray:
    """Sums of squares per tensor of a toy layout whose blocks have these norms."""
    squares = [norm * norm * fraction for norm in norms for fraction in SHARES]
    return np.array([around, *squares, around, around])


def of_blocks(frozen: np.ndarray) -> list[bool]:
    """Which blocks are frozen; fails where one is frozen in part."""
    blocks = frozen[1 : len(frozen) - N_AROUND + 1].reshape(-1, len(SHARES))
    assert (blocks.all(axis=1) == blocks.any(axis=1)).all()
    return blocks.all(axis=1).tolist()


def prefix_length(frozen: np.ndarray) -> int:
    """Number of frozen blocks; fails if they are not a prefix that has the embedding with it."""
    blocks = of_blocks(frozen)
    length = sum(blocks)
    assert blocks == [True] * length + [False] * (len(blocks) - length)
    assert frozen[0] == (length > 0)
    assert not frozen[-2:].any(), "norm and head are behind every block"
    return length


def run(
    policy: FreezePolicy,
    layout: ModelLayout,
    checks: Iterable[Mapping[Metric, np.ndarray]],
    *,
    seed: int = 0,
    through_json: bool = False,
) -> list[Decision]:
    """Decisions from the start on; ``through_json`` reloads each as a resumed run would."""
    decisions = [policy.start(Check(0, layout, {}, seed))]
    for number, metrics in enumerate(checks, start=1):
        before = decisions[-1]
        if through_json:
            before = reloaded(before)
        decisions.append(policy.decide(before, Check(number, layout, metrics, seed)))
    return decisions


def reloaded(decision: Decision) -> Decision:
    """What a checkpoint gives back; nothing is said about metrics."""
    plain = json.loads(json.dumps(dict(decision.memory)))
    assert plain == dict(decision.memory)
    return Decision(decision.frozen.copy(), plain)


def assert_resumes(
    policy: FreezePolicy, layout: ModelLayout, checks: Sequence[Mapping[Metric, np.ndarray]]
) -> None:
    """A run reloaded at every check decides as one that is not."""
    whole = run(policy, layout, checks)
    parts = run(policy, layout, checks, through_json=True)
    for a, b in zip(whole, parts, strict=True):
        assert a.frozen.tolist() == b.frozen.tolist()
        assert a.memory == b.memory
        assert a.metrics == b.metrics


def only_error(policy: Any) -> str:
    """The one error a policy reports."""
    (error,) = list(policy.errors())
    return str(error)
