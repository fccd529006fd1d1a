"""Runs that are made emulated and with a process for each rank: their scenarios."""

from launcher import EMULATED, SCHEDULES, arguments
from methods import ROW, STEPS
from saving import SAVED, resumed_from

# No freezing, a plan, and policies that freeze the front: its stages skip their backwards whole.
METHODS = ["none", "timelyfreeze", "autofreeze", "egeria"]
ONE_SCHEDULE = "1F1B"  # on which two ranks run every method
# Stops after which a run goes on in the other form.
PLACES = {"upper bound": 3, "lower bound": 5, "ramp": 8, "stable": 11}
COMMON = {"training__steps": STEPS, "training__max_norm": 0.5}
# One with a full and one with a split backward, packed rows, and rows to validate on.
VALIDATION = {
    "validation__enable": None,
    "validation__dataset": "alpaca",
    "validation__dataset_path": "tests/assets/tiny_instruct",
    "validation__local_batch_size": 8,
    "validation__seq_len": 48,
    "validation__freq": 4,
    "data__validation_fraction": 16 / 1210,
    "training__seq_len": 64,
    "data__packing": None,
}


def method_arguments(method):
    return {"freezing__method": "none"} if method == "none" else ROW[method].arguments


def scenario(name, settings, *, method="timelyfreeze", emulated=False, **more):
    settings = {**COMMON, **method_arguments(method), **settings, **(EMULATED if emulated else {})}
    return {
        "name": name,
        "fake_clock": method != "none",
        "module": ROW[method].module if method in ROW else None,
        "args": arguments(**settings),
        **more,
    }


def compared(n_ranks, folder):
    """{name: (settings, what else a scenario has)} of runs that both forms make."""
    runs = {}
    for schedule in SCHEDULES:
        methods = METHODS if n_ranks == 4 else ["timelyfreeze", "none"]
        if n_ranks == 2 and schedule == ONE_SCHEDULE:
            methods = ["none", *ROW]
        for method in methods:
            settings = {
                "model__flavor": "short" if n_ranks == 2 else "tiny",
                "parallelism__pipeline_parallel_degree": n_ranks,
                "parallelism__pipeline_parallel_schedule": schedule,
            }
            runs[f"{n_ranks} {method} {schedule}"] = (settings, {"method": method})
    if n_ranks == 4:
        csv = {
            "parallelism__pipeline_parallel_schedule": "PipelineScheduleSingle",
            "parallelism__pipeline_parallel_schedule_csv": str(folder / "ahead.csv"),
            "parallelism__pipeline_parallel_microbatch_size": 1,  # it is of 8 microbatches
        }
        runs["csv"] = (csv, {})
        zbv = {"parallelism__pipeline_parallel_schedule": "ZBVZeroBubble"}
        runs["both"] = (zbv, {"method": "timelyfreeze+apf"})
        runs["keep chain"] = ({"freezing__first_stage": "per_tensor"}, {})
        runs["two batches"] = ({"training__global_batch_size": 16}, {})
        runs["skipped"] = (
            {
                "parallelism__pipeline_parallel_schedule": "InterleavedZeroBubble",
                "freezing__max_freeze_ratio": 1.0,  # for fronts of several stages
            },
            {},
        )
    else:
        for schedule in ("1F1B", "ZBVZeroBubble"):
            settings = {
                **VALIDATION,
                "model__flavor": "short",
                "parallelism__pipeline_parallel_degree": 2,
                "parallelism__pipeline_parallel_schedule": schedule,
            }
            runs[f"validation {schedule}"] = (settings, {})
            seeded = {**settings, "debug__seed": 123, "training__mixed_precision_param": "bfloat16"}
            runs[f"seeded {schedule}"] = (seeded, {"fixed_weights": False})
    return runs


def resumed_settings(method, saved=None):
    settings = {
        **SAVED,
        "model__flavor": "short",
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_schedule": "ZBVZeroBubble",
        "training__global_batch_size": 16,
    }
    if saved is not None:
        settings |= resumed_from(saved)
    return settings


def saves(method, **more):
    return scenario(
        f"saves {method}", resumed_settings(method), method=method,
        save_at=list(PLACES.values()), **more,
    )  # fmt: skip


def resumes(method, place, folder, **more):
    saved = folder / f"saves {method}" / "checkpoint" / f"step-{PLACES[place]}"
    return scenario(
        f"{method} from {place}", resumed_settings(method, saved), method=method,
        fixed_weights=False, save_at=[], **more,
    )  # fmt: skip
