"""Runs whose pipeline becomes shorter: their scenarios for ``elastic_run.py``, what they saw."""

import json

import pytest
from launcher import ROOT, arguments

N_STEPS = 10
# Checks after steps 4, 6 and 8 of 10 layers.
FREEZING = {
    "freezing__method": "linear",
    "freezing__last_warmup_step": 2,
    "freezing__linear.check_interval": 2,
    "freezing__linear.layers_per_check": 4,
    "freezing__linear.max_layers": 9,
}
# 7 of 8 layers are frozen after step 8, 4 before: halves of monitoring are steps 3-4 and 5-6.
PLANNED = {
    "model__flavor": "tiny",
    "freezing__method": "timelyfreeze+linear",
    "freezing__last_monitor_step": 6,
    "freezing__last_ramp_step": 8,
    "freezing__discard_batches": 1,
    "freezing__linear.max_layers": 7,
    "training__steps": 18,
}
# The run moves before step 10, the first after a stable one.
PHASES = (
    ["warmup"] * 2 + ["upper_bound"] * 2 + ["lower_bound"] * 2 + ["ramp"] * 2 + ["stable"]
    + ["upper_bound"] * 2 + ["lower_bound"] * 2 + ["ramp"] * 2 + ["stable"] * 3
)  # fmt: skip
# Those of a run that begins in the pipeline to which the other one moves, and plans when it does.
THERE = {
    **PLANNED,
    "freezing__method": "timelyfreeze+fixed",
    "freezing__fixed.layers": 7,
    "freezing__last_warmup_step": 9,
    "freezing__last_monitor_step": 13,
    "freezing__last_ramp_step": 15,
}


@pytest.fixture(scope="module", name="folder")
def rows_folder(tmp_path_factory):
    """Where everything is, with rows that are short enough for none to be left out."""
    folder = tmp_path_factory.mktemp("elastic")
    rows = (ROOT / "tests/assets/tiny_instruct/train.jsonl").read_text().splitlines()
    short = sorted(rows, key=lambda row: len("".join(json.loads(row).values())))[:101]
    (folder / "rows.jsonl").write_text("\n".join(short) + "\n")
    (folder / "few_rows.jsonl").write_text("\n".join(short[:32]) + "\n")
    return folder


def scenario(
    folder,
    name,
    *,
    is_elastic,
    save_at=(),
    late=None,
    seconds=None,
    resumes=None,
    module=None,
    front=0,
    **settings,
):
    saved = {}
    if resumes is not None:
        saved = {
            "checkpoint__initial_load_path": folder / resumes,
            "checkpoint__no_initial_load_model_only": None,
        }
    elastic = {"freezing__elastic.enable": None} if is_elastic else {}
    return {
        "name": name,
        "is_elastic": is_elastic,
        "fake_clock": settings.get("freezing__method", "").startswith("timelyfreeze"),
        "module": module,
        "front": front,
        "save_at": list(save_at),
        "late": late or {},
        "seconds": seconds or {},
        "resumes": resumes is not None,
        "args": arguments(
            **{
                "model__flavor": "ten",
                "training__dataset_path": folder / "rows.jsonl",
                "training__seq_len": 64,
                "training__steps": N_STEPS,
                "training__mixed_precision_param": "float32",
                "parallelism__pipeline_parallel_degree": 4,
                "parallelism__pipeline_parallel_microbatch_size": 2,
                "validation__no_enable": None,
                "checkpoint__enable": None,
                "checkpoint__keep_latest_k": 0,
                **FREEZING,
                **elastic,
                **settings,
                **saved,
            }
        ),
    }


def per_step(ranks, key):
    """Return {step: everything that replicas saw of it}, of the ranks with the first stage."""
    together = {}
    for rank in ranks:
        for step, value in rank[key]:
            together.setdefault(step, []).append(value)
    return together


def rows_of_steps(ranks):
    return {
        step: {row for rows in found for row in rows}
        for step, found in per_step(ranks, "rows").items()
    }


def losses_of_steps(ranks):
    return {step: sum(found) for step, found in per_step(ranks, "losses").items()}
