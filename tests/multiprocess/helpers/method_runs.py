"""Emulated runs of every freezing method, undisturbed and resumed, which two files share."""

from launcher import EMULATED, arguments, run_scenarios
from methods import ROW, STEPS
from saving import SAVED, resumed_from

# The one that has most to keep in a checkpoint, and to accumulate.
MOST_TO_KEEP = "timelyfreeze+apf"
# Policies on other schedules are compared with runs on this one.
REFERENCE = "1F1B"


def freezing_arguments(method, schedule, **more):
    return arguments(
        model__flavor="short",
        parallelism__pipeline_parallel_degree=2,
        parallelism__pipeline_parallel_schedule=schedule,
        training__steps=STEPS,
        training__global_batch_size=16 if method == MOST_TO_KEEP else 8,
        **SAVED,
        **EMULATED,
        **ROW[method].arguments,
        **more,
    )


def run_methods(folder, tests):
    """Run methods and return {"method schedule", or that and " from STEP": what its process saw}.

    Args:
        folder: For their files.
        tests: Parameters of each test: its method, maybe a schedule, and the step of a stop.
    """
    asked = {(t["method"], t.get("schedule", REFERENCE), t.get("step")): None for t in tests}
    asked |= {(m, REFERENCE, None): None for m, _, _ in asked if not ROW[m].plans}
    scenarios = {}
    for method, schedule, step in asked:
        name = f"{method} {schedule}"
        whole = {
            "name": name,
            "module": ROW[method].module,
            "fake_clock": True,
            "save_at": [],
            "args": freezing_arguments(method, schedule),
        }
        whole = scenarios.setdefault(name, whole)
        if step is None:
            continue
        whole["save_at"].append(step)
        resumed = {
            "name": f"{name} from {step}",
            "after": name,
            "fixed_weights": False,
            "save_at": [],
            "args": freezing_arguments(
                method,
                schedule,
                **resumed_from(folder / name / "checkpoint" / f"step-{step}"),
            ),
        }
        scenarios[resumed["name"]] = {**whole, **resumed}
    return run_scenarios(folder, 1, list(scenarios.values()), timeout_s=1700)
