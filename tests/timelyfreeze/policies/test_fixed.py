import pytest

from tests.timelyfreeze.helpers.toy_model import prefix_length, run, toy_layout
from timelyfreeze.policies.fixed import Fixed
from timelyfreeze.policies.policy import Check


@pytest.mark.parametrize("layers", [0, 1, 3, 5])
def test_the_first_layers_are_frozen_from_the_start_to_the_end(layers: int) -> None:
    decisions = run(Fixed(layers), toy_layout(5), [{}] * 3)
    assert [prefix_length(d.frozen) for d in decisions] == [layers] * 4
    assert decisions[0].metrics == {"frozen_layers": layers}


def test_it_never_decides_anew() -> None:
    assert all(step % Fixed(2).check_interval for step in range(1, 10**6, 999))


def test_a_resumed_run_keeps_what_was_frozen() -> None:
    decisions = run(Fixed(2), toy_layout(5), [{}] * 3, through_json=True)
    assert [prefix_length(d.frozen) for d in decisions] == [2] * 4


def test_more_layers_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fixed\.layers is 6; the model has 5"):
        Fixed(6).start(Check(0, toy_layout(5), {}, 0))


LAYOUT = toy_layout(12)


def frozen_names(*patterns: str, layers: int | None = None) -> list[str]:
    decision = Fixed(layers, list(patterns)).start(Check(0, LAYOUT, {}, 0))
    return [name for name, frozen in zip(LAYOUT.names, decision.frozen, strict=True) if frozen]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("tok_embeddings", ["tok_embeddings.weight"]),
        ("embed", ["tok_embeddings.weight"]),
        ("*.norm", ["norm.weight"]),
        ("output.weight", ["output.weight"]),
        ("layers.1", [f"layers.1.{name}.weight"
                      for name in ("attention.wq", "attention.wo", "feed_forward.w1")]),
        ("layers.9-10.attention.wq",
         ["layers.9.attention.wq.weight", "layers.10.attention.wq.weight"]),
        ("layers.*.wo", [f"layers.{layer}.attention.wo.weight" for layer in range(12)]),
        ("layers.1[01].*.wo.weight",
         ["layers.10.attention.wo.weight", "layers.11.attention.wo.weight"]),
    ],
)  # fmt: skip
def test_a_pattern_names_tensors_or_modules(pattern: str, expected: list[str]) -> None:
    assert frozen_names(pattern) == expected


def test_names_are_frozen_together_and_besides_layers() -> None:
    both = frozen_names("embed", "layers.0-1", "*.norm")
    assert both == [*LAYOUT.names[:7], "norm.weight"]
    assert frozen_names("*.norm", layers=2) == both
    assert frozen_names("*.norm", layers=0) == ["norm.weight"]


@pytest.mark.parametrize(
    ("names", "n_front"),
    [(["layers.0-4"], 0), (["embed", "layers.0-2", "layers.5"], 3), (["*"], 12)],
)
def test_the_front_is_told(names: list[str], n_front: int) -> None:
    decision = Fixed(names=names).start(Check(0, LAYOUT, {}, 0))
    assert decision.metrics == {"frozen_layers": n_front}


def test_without_names_one_layer_is_frozen() -> None:
    assert prefix_length(Fixed().start(Check(0, toy_layout(5), {}, 0)).frozen) == 1


@pytest.mark.parametrize(
    ("pattern", "near"),
    [("embeddings", "tok_embeddings"), ("layers.12-15", "layers.1"), ("layers.1-0", "layers.10"),
     ("norms", "norm"), ("", "")],
)  # fmt: skip
def test_a_pattern_that_matches_nothing_is_refused(pattern: str, near: str) -> None:
    with pytest.raises(ValueError, match=r"^fixed\.names has ") as told:
        frozen_names("layers.0", pattern)
    rule, _, nearest = str(told.value).partition("; the nearest names are ")
    assert rule == f"fixed.names has {pattern!r}; it must match a tensor or module of the model"
    assert near in nearest.split(", ") or near == ""
