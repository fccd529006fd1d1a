"""One thing that was looked at: what was found, and what to do if it is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What was found of a subject.

    Attributes:
        subject: What was looked at, such as "disk".
        found: What is there, values and all.
        remedy: What to do; None where nothing is wrong.
    """

    subject: str
    found: str
    remedy: str | None = None

    @property
    def is_wrong(self) -> bool:
        """Whether something has to be done."""
        return self.remedy is not None


def render(findings: Sequence[Finding]) -> str:
    """Return a line for each finding, and below a wrong one what to do."""
    width = max((len(each.subject) for each in findings), default=0)
    lines = []
    for each in findings:
        mark = "wrong" if each.is_wrong else "ok"
        lines.append(f"{mark:<6} {each.subject:<{width}}  {each.found}")
        if each.is_wrong:
            lines.append(f"{'':<6} {'':<{width}}  -> {each.remedy}")
    return "\n".join(lines)
