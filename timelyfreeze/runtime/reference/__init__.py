"""A copy of a few blocks, run beside the training to compare outputs."""

from timelyfreeze.policies import ReferenceSettings
from timelyfreeze.policies.policy import INLINE
from timelyfreeze.runtime.reference.model import CapturedBatch, InlineReference
from timelyfreeze.runtime.reference.process import ReferenceProcess

Reference = InlineReference | ReferenceProcess  # where comparisons are made


def make_reference(settings: ReferenceSettings) -> Reference:
    """Return a reference of the kind in the settings."""
    return InlineReference(settings) if settings.place == INLINE else ReferenceProcess(settings)
