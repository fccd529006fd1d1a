"""Pipeline schedules: actions, their order on each rank, and their dependencies."""

from timelyfreeze.schedule.dag import (
    PipelineDag,
    build_dag,
    check_delays,
    check_durations,
    connect,
    critical_positions,
    dependencies,
    edge_delays,
    makespan,
    start_times,
    topological_order,
)
from timelyfreeze.schedule.names import SCHEDULES, splits_backward, stages_per_rank
from timelyfreeze.schedule.order import (
    MAX_CELLS,
    Action,
    ActionKind,
    ScheduleError,
    ScheduleOrder,
    build_order,
    gpipe_order,
    one_f_one_b_order,
    order_from_csv,
    order_to_csv,
    parse_action,
    parse_order,
    stages_of_ranks,
)
