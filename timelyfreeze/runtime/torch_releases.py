"""Refuses a torch not tested with the adapters, before any other import of it.

Changes of torch's private names need not fail: with one release a middle stage kept its loss and
lost its gradients. So an untested release is an error, and not a warning.
"""

import os

import torch

# The first release that works, and the first that was not tested; pyproject.toml has the same.
FIRST, END = (2, 13), (2, 16)
UNTESTED = "TIMELYFREEZE_UNTESTED_TORCH"


def require_tested(version: str, allowed: str | None) -> None:
    """Raise unless ``version`` of torch was tested, or is named by ``allowed``."""
    major, minor = version.split(".")[:2]
    if FIRST <= (int(major), int(minor)) < END or allowed == version:
        return
    first, last = (f"{major}.{minor}" for major, minor in (FIRST, (END[0], END[1] - 1)))
    raise ImportError(
        f"torch {version} was not tested with this release of timelyfreeze, and gradients could be "
        f"wrong without an error; install torch {first} to {last}. To try it: {UNTESTED}={version}"
    )


require_tested(torch.__version__, os.environ.get(UNTESTED))
