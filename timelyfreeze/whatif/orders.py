"""Orders by the name of their schedule, with torch imported for those alone that need it.

Importing torch takes longer than planning. GPipe and 1F1B come from our own generators; the order
of every other schedule is torch's (``torch_pipelining``).
"""

from __future__ import annotations

from timelyfreeze.schedule import ScheduleOrder, gpipe_order, one_f_one_b_order

_OUR_OWN = {"gpipe": gpipe_order, "1f1b": one_f_one_b_order}


def stages_in(schedule: str, n_ranks: int, n_measured: int | None = None) -> int:
    """Return how many stages a schedule has.

    Args:
        schedule: As in ``parallelism.pipeline_parallel_schedule``, in any case.
        n_ranks: Pipeline ranks.
        n_measured: A number of stages to keep to, where the schedule can have so many.

    Raises:
        ValueError: If the schedule is unknown, or one of a CSV file.
    """
    if schedule.lower() in _OUR_OWN:
        return n_ranks
    from timelyfreeze.runtime import known_schedules, places_stages_in_v, stages_per_rank

    named = [name for name in known_schedules() if not name.startswith("PipelineSchedule")]
    if schedule.lower() not in (name.lower() for name in named):
        raise ValueError(f"{schedule!r} is no schedule; known: {', '.join(named)}")
    default = (stages_per_rank(schedule) or 1) * n_ranks
    if places_stages_in_v(schedule) or n_measured is None or n_measured % n_ranks:
        return default
    return n_measured if n_measured >= 2 * n_ranks else default


def order_of(schedule: str, n_ranks: int, n_stages: int, n_microbatches: int) -> ScheduleOrder:
    """Return the order in which the ranks of a schedule work.

    Raises:
        ValueError: If the schedule cannot be built from these numbers.
    """
    own = _OUR_OWN.get(schedule.lower())
    if own is not None:
        return own(n_stages, n_microbatches)
    from timelyfreeze.runtime import named_order

    return named_order(schedule, n_ranks, n_microbatches, stages_per_rank=n_stages // n_ranks)
