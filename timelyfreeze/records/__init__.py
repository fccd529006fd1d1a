"""What a run leaves behind, as values and files: timelines, traces, losses, steps, summary."""

from timelyfreeze.records.convergence import (
    PassedEnergy,
    StepLog,
    TimedStep,
    kappa_error,
    kappa_of_cap,
    kappa_over_p_eff,
    mean_p_eff,
    passed_energy,
)
from timelyfreeze.records.scores import (
    AVERAGED,
    BENCHMARKS,
    BY_KEY,
    HUB,
    SCORES,
    Benchmark,
    Score,
    Scores,
    read_scores,
    render_scores,
    scores_to_json,
)
from timelyfreeze.records.seen_batch import SeenBatch, measured_timeline
from timelyfreeze.records.summary import (
    FINAL,
    SUMMARY_FILE,
    RunSummary,
    as_shown,
    read_summary,
    summary_to_json,
)
from timelyfreeze.records.tables import (
    ACCURACIES,
    COUNTS,
    FRONT,
    LOSSES,
    MOVES,
    PLASTICITY,
    RESPONSES,
    STEPS,
    WINDOW,
    AccuracyRow,
    FrontRow,
    FrozenCount,
    LossRow,
    Move,
    PlasticityRow,
    ResponseRow,
    StepRow,
    last_running_mean,
    never_updated,
    running_means,
    seconds_to_reach,
)
from timelyfreeze.records.timeline import (
    FRONT_READ,
    FROZEN,
    KIND_WORDS,
    UNFROZEN,
    Block,
    Timeline,
    predicted_timelines,
    timeline_file,
    timeline_files,
    timeline_from_json,
    timeline_to_json,
)
from timelyfreeze.records.title import RunNames, as_drawn, read_names, run_title
from timelyfreeze.records.trace import trace_to_json
