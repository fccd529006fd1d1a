"""The policy and the pictures of two helpers, for a scenario that needs both."""

import every_other_policy  # noqa: F401
import few_pictures  # noqa: F401
