"""Makes the flavor "tiny" known: image classifiers of a few thousand parameters."""

from tests.torchtitan.helpers.image_models import SETTINGS
from torchtitan.vision.model import FLAVORS

for kind, settings in SETTINGS.items():
    FLAVORS[kind]["tiny"] = settings
