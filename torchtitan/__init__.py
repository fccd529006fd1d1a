"""Our layer over the installed TorchTitan release.

This folder joins the installed package instead of replacing it: a module that exists here is ours,
every other ``torchtitan.*`` module comes from the wheel pinned in ``pyproject.toml``. That needs
the repository root to come first on ``sys.path``, which ``run_train.sh`` and the test configuration
see to.
"""

from importlib.metadata import version
from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
__version__ = version("torchtitan")

# The wheel's own __init__ is shadowed by this file; what it does besides naming the version is
# register the quantization converters.
import torchtitan.components.quantization  # noqa: F401
