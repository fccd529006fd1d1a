"""A run that goes on with another number of processes: what one part of it leaves the next.

``timelyfreeze.cli.torchrun`` starts the next part once all processes of one have ended well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from timelyfreeze.files import write_whole

# Names the file in which a part says how the run goes on; set where somebody will read it.
NEXT = "TIMELYFREEZE_NEXT_PART"
# What the part before has said.
PRESENT = "TIMELYFREEZE_PART"


@dataclass(frozen=True)
class Part:
    """How a run goes on.

    Attributes:
        split: Layers of each process, which has one stage of the pipeline.
        first_split: Likewise of the run's first part.
        n_former: Processes of the part before.
        left_at: When these began to leave, in seconds since the epoch.
    """

    split: Sequence[int]
    first_split: Sequence[int]
    n_former: int
    left_at: float

    def leave(self) -> None:
        """Write it down for whoever starts processes; one process of the former part does."""
        write_whole(Path(os.environ[NEXT]), json.dumps(asdict(self)).encode())


def present_part() -> Part | None:
    """Return what this process goes on from; None in the first part of a run."""
    text = os.environ.get(PRESENT)
    return None if text is None else Part(**json.loads(text))
