"""How models are cut, against upstream."""

import pytest
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

from timelyfreeze.whatif.grid import default_split, render_split


@pytest.mark.parametrize("n_layers", [6, 10, 16, 32, 33])
@pytest.mark.parametrize("n_stages", [2, 4, 5, 8])
def test_the_default_cut_is_upstreams(n_layers: int, n_stages: int) -> None:
    cut = generate_llm_fqn_per_model_part(n_stages, n_layers)
    layers = tuple(sum(name.startswith("layers.") for name in names) for names in cut)
    assert default_split(n_layers, n_stages) == layers


def test_refuses_more_stages_than_there_is_to_cut() -> None:
    with pytest.raises(ValueError, match="3 layers cannot be cut into 6 stages"):
        default_split(3, 6)


def test_a_split_as_text() -> None:
    assert render_split((9, 8, 8, 7)) == "9,8,8,7"
