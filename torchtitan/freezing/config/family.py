"""What the layer has to know of a kind of model: what it reads, and what is counted of it."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.freezing.config.job_config import JobConfig


@dataclass(frozen=True)
class ModelFamily:
    """A kind of model.

    Attributes:
        unit: What throughput counts: words for it, in the plural.
        reads_text: Whether it reads tokens, which a tokenizer makes, in rows of
            ``training.seq_len``; otherwise a row is one thing to count.
    """

    unit: str
    reads_text: bool

    def per_row(self, config: JobConfig) -> int:
        """Return how many units a row of a batch has."""
        return config.training.seq_len if self.reads_text else 1


TEXT = ModelFamily("tokens", reads_text=True)
IMAGES = ModelFamily("images", reads_text=False)
IMAGE_MODELS = ("vit", "convnextv2")


def model_family(config: JobConfig) -> ModelFamily:
    """Return the family of ``model.name``."""
    return IMAGES if config.model.name in IMAGE_MODELS else TEXT
