"""What is counted of a model: tokens of rows, or pictures."""

import pytest

from tests.torchtitan.helpers.job_configs import config
from torchtitan.freezing.config import model_family, pipeline_notes, pipeline_order, pipeline_title


@pytest.mark.parametrize(
    ("name", "unit", "per_microbatch", "title"),
    [
        ("llama3", "tokens", 2 * 64, "4 microbatches of 2 x 64 tokens, weights float32"),
        ("vit", "images", 2, "4 microbatches of 2 images, weights float32"),
        ("convnextv2", "images", 2, "4 microbatches of 2 images, weights float32"),
    ],
)
def test_a_row_is_its_tokens_or_one_picture(
    name: str, unit: str, per_microbatch: int, title: str
) -> None:
    given = config(
        model__name=name,
        training__seq_len=64,
        parallelism__pipeline_parallel_microbatch_size=2,
    )
    assert model_family(given).unit == unit
    order = pipeline_order(given, 8)
    notes = pipeline_notes(given, order, 8)
    assert (notes.tokens_per_microbatch, notes.unit) == (per_microbatch, unit)
    assert title in pipeline_title(given)


@pytest.mark.parametrize(("rank", "mode"), [(0, "all_or_nothing"), (8, "per_tensor")])
def test_notes_say_how_the_first_stage_was_frozen(rank: int, mode: str) -> None:
    """Gradients of a rank keep its chain, whatever the key says; who plans from the notes must."""
    given = config(freezing__gradient_rank=rank)
    assert pipeline_notes(given, pipeline_order(given, 8), 8).first_stage == mode
