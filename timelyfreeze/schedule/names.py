"""Schedules of torch by name, known without torch."""

# Names that torch can build, and the stages that upstream gives each rank by default. The last two
# stand for a CSV schedule.
_STAGES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
    "LoopedBFS": 2,
    "PipelineScheduleSingle": 1,
    "PipelineScheduleMulti": 2,
}
SCHEDULES = tuple(_STAGES)
_SPLIT = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")
_BY_NAME = {name.lower(): stages for name, stages in _STAGES.items()}


def stages_per_rank(schedule_name: str) -> int | None:
    """Return upstream's default number of stages per rank; None for an unknown name."""
    return _BY_NAME.get(schedule_name.lower())


def splits_backward(schedule_name: str) -> bool:
    """Return whether a schedule has separate actions for input and weight gradients."""
    return schedule_name.lower() in _SPLIT
