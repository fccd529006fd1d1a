"""Build hook: an editable install finds our part of ``torchtitan`` from every folder."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class OverlayHook(BuildHookInterface):
    """Adds a line that Python runs at its start; an ordinary wheel does not need it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the line to ``build_data`` if the install is editable."""
        if version == "editable":
            build_data["force_include_editable"]["scripts/overlay.pth"] = "timelyfreeze.pth"
