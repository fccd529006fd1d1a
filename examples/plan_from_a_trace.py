"""Plan freeze ratios from the times of any framework: Megatron, DeepSpeed, one's own.

    python examples/plan_from_a_trace.py examples/trace.csv --max-freeze-ratio 0.8

The trace is a CSV table with a row for each action of a batch:

    rank,action,start_ms,duration_ms,frozen
    0,0F0,0.0,10.2,no

An action is called by its stage, its kind and its microbatch: 2F0 is the forward of microbatch 0 in
stage 2, 2B0 its backward; where a backward is split, 2I0 is the half for input gradients and 2W0
the one for weight gradients. "frozen" says whether the row comes from a batch in which all weights
were frozen ("yes": only input gradients were computed) or none ("no"). Both are needed of every
action; several batches of each are better, for their medians count. Within a rank, actions run in
the order of their start in the unfrozen batches.

The plan goes to the screen as a table, or with --json to a file.
"""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from timelyfreeze import (
    Action,
    DurationBounds,
    FreezePlan,
    PipelineDag,
    bounds_from_samples,
    build_dag,
    build_order,
    parse_action,
    solve_freeze_ratios,
)

COLUMNS = ("rank", "action", "start_ms", "duration_ms", "frozen")
Samples = dict[Action, list[float]]


def read_trace(path: Path) -> tuple[PipelineDag, DurationBounds]:
    """Return the pipeline that a trace shows, and how long its actions take.

    Raises:
        ValueError: Naming the line that cannot be used, or what is missing.
    """
    started: dict[int, dict[Action, float]] = {}
    samples: dict[str, Samples] = {"no": {}, "yes": {}}
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        if tuple(table.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: its first line must be {','.join(COLUMNS)}")
        for line in table:
            try:
                rank, action = int(line["rank"]), parse_action(line["action"])
                start_ms, duration_ms = float(line["start_ms"]), float(line["duration_ms"])
                samples[line["frozen"]].setdefault(action, []).append(duration_ms)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {table.line_num}: {error}") from error
            if line["frozen"] == "no":
                started.setdefault(rank, {}).setdefault(action, start_ms)
    rows = [sorted(started[rank], key=started[rank].__getitem__) for rank in sorted(started)]
    dag = build_dag(build_order(rows))
    return dag, bounds_from_samples(dag, unfrozen=samples["no"], frozen=samples["yes"])


def as_table(plan: FreezePlan) -> str:
    """Return what the plan promises, and its ratios: a line for each stage, by microbatch."""
    lines = [
        f"batch without freezing  {plan.unfrozen_batch_ms:8.1f} ms",
        f"batch with the plan     {plan.batch_ms:8.1f} ms ({100 * plan.gain:+.1f}% throughput)",
        f"batch all frozen        {plan.frozen_batch_ms:8.1f} ms",
        "freeze ratios of backwards, by stage and microbatch:",
    ]
    of_stage: dict[int, dict[int, float]] = {}
    for action, ratio in zip(plan.actions, plan.ratios.tolist(), strict=True):
        if action.kind.freezable:
            of_stage.setdefault(action.stage, {})[action.microbatch] = ratio
    for stage, ratios in sorted(of_stage.items()):
        row = " ".join(f"{ratio:.2f}" for _, ratio in sorted(ratios.items()))
        lines.append(f"  stage {stage}: {row}  (mean {sum(ratios.values()) / len(ratios):.2f})")
    return "\n".join(lines)


def as_json(plan: FreezePlan) -> str:
    """Return the same as JSON: times in milliseconds, ratios by action."""
    ratios = zip(plan.actions, plan.ratios.tolist(), strict=True)
    found = {
        "unfrozen_batch_ms": plan.unfrozen_batch_ms,
        "batch_ms": plan.batch_ms,
        "frozen_batch_ms": plan.frozen_batch_ms,
        "ratios": {str(action): ratio for action, ratio in ratios if action.kind.freezable},
    }
    return json.dumps(found, indent=2) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Read the command line and the trace, plan, print.

    Returns:
        The exit status: 2 if the trace cannot be used.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="CSV file; see the head of this script")
    parser.add_argument(
        "--max-freeze-ratio", type=float, default=0.8, help="cap on the mean ratio of a stage"
    )
    parser.add_argument("--json", type=Path, help="file to write the plan to, instead")
    args = parser.parse_args(arguments)
    try:
        dag, bounds = read_trace(args.trace)
        plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=args.max_freeze_ratio)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json is None:
        print(as_table(plan))
    else:
        args.json.write_text(as_json(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
