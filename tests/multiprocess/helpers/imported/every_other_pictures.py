"""The policy and the pictures of two helpers, for a scenario that needs both."""

from imported import (
    every_other_policy,  # noqa: F401
    few_pictures,  # noqa: F401
)
