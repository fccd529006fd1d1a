import numpy as np
import pytest

from timelyfreeze.policies.layout import build_layout

# Two stages of a model whose blocks are numbered 4, 5 and 6, as where a pipeline keeps the numbers
# of the whole model.
STAGES = {
    1: [("layers.6.w.weight", 3), ("norm.weight", 2), ("output.weight", 9)],
    0: [
        ("tok_embeddings.weight", 8),
        ("layers.4.w.weight", 5),
        ("layers.4.v.weight", 6),
        ("layers.5.w.weight", 7),
    ],
}


def test_every_tensor_has_its_place() -> None:
    layout = build_layout(STAGES)
    assert layout.names == (
        "tok_embeddings.weight",
        "layers.4.w.weight",
        "layers.4.v.weight",
        "layers.5.w.weight",
        "layers.6.w.weight",
        "norm.weight",
        "output.weight",
    )
    assert layout.sizes.tolist() == [8, 5, 6, 7, 3, 2, 9]
    assert layout.stages.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert layout.layers.tolist() == [-1, 0, 0, 1, 2, 3, 3]
    assert layout.n_layers == 3


def test_a_layer_may_be_spread_over_neighbouring_stages() -> None:
    layout = build_layout({0: [("layers.0.a", 1), ("layers.1.a", 1)], 1: [("layers.1.b", 1)]})
    assert layout.layers.tolist() == [0, 1, 1]
    assert layout.stages.tolist() == [0, 0, 1]


def test_a_stage_knows_its_tensors() -> None:
    layout = build_layout(STAGES)
    assert layout.of_stage(0).tolist() == [0, 1, 2, 3]
    assert layout.of_stage(1).tolist() == [4, 5, 6]
    assert layout.of_stage(2).tolist() == []


def test_a_prefix_takes_the_embedding_with_it() -> None:
    layout = build_layout(STAGES)
    found = [np.flatnonzero(layout.prefix(k)).tolist() for k in range(4)]
    assert found == [[], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("n_layers", [-1, 4])
def test_a_prefix_of_layers_that_are_not_there_is_refused(n_layers: int) -> None:
    with pytest.raises(ValueError, match=f"prefix of {n_layers} layers .* the model has 3"):
        build_layout(STAGES).prefix(n_layers)


def test_sums_are_of_blocks_only() -> None:
    sums = build_layout(STAGES).layer_sums([100.0, 1.0, 2.0, 4.0, 8.0, 100.0, 100.0])
    assert sums.dtype == np.float64
    assert sums.tolist() == [3.0, 4.0, 8.0]


def test_a_layout_cannot_be_changed() -> None:
    layout = build_layout(STAGES)
    for array in (layout.sizes, layout.stages, layout.layers):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            {0: [("layers.0.w", 1)], 1: [("layers.0.w", 1)]},
            "parameter 'layers.0.w' is in the model twice",
        ),
        ({0: [("weight", 1), ("bias", 1)]}, "no parameter name has a layer number"),
        ({}, "no parameter name has a layer number"),
        (
            {0: [("layers.0.a", 1), ("layers.1.a", 1), ("layers.0.b", 1)]},
            "not in order from the first stage to the last",
        ),
        # A stage with the first and the last layer, as hand-made splits of V shapes might have it.
        (
            {0: [("layers.0.a", 1), ("layers.2.a", 1)], 1: [("layers.1.a", 1), ("layers.2.b", 1)]},
            "not in order from the first stage to the last",
        ),
    ],
)
def test_models_without_an_order_of_layers_are_refused(stages: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_layout(stages)
