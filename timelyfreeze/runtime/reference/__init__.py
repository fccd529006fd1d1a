"""A copy of a few blocks that runs beside the training, to compare its output with theirs."""

from timelyfreeze.policies import ReferenceSettings
from timelyfreeze.policies.policy import INLINE
from timelyfreeze.runtime.reference.model import CapturedBatch, InlineReference
from timelyfreeze.runtime.reference.process import ReferenceProcess

Reference = InlineReference | ReferenceProcess  # where comparisons are made


def make_reference(settings: ReferenceSettings) -> Reference:
    """Return a reference where the settings want it."""
    return InlineReference(settings) if settings.place == INLINE else ReferenceProcess(settings)
