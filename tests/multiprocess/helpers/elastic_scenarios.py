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


@pytest.fixture(scope="module", name="folder")
def rows_folder(tmp_path_factory):
    """Where everything is, with rows that are short enough for none to be left out."""
    folder = tmp_path_factory.mktemp("elastic")
    rows = (ROOT / "tests/assets/tiny_instruct/train.jsonl").read_text().splitlines()
    short = sorted(rows, key=lambda row: len("".join(json.loads(row).values())))[:101]
    (folder / "rows.jsonl").write_text("\n".join(short) + "\n")
    (folder / "few_rows.jsonl").write_text("\n".join(short[:40]) + "\n")
    return folder


def scenario(
    folder, name, *, is_elastic, save_at=(), late=None, seconds=None, resumes=None, **settings
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
        "save_at": list(save_at),
        "late": late or {},
        "seconds": seconds or {},
        "resumes": resumes is not None,
        "args": arguments(
            **{
                "model__flavor": "8M",
                "training__dataset_path": folder / "rows.jsonl",
                "training__seq_len": 64,
                "training__steps": N_STEPS,
                "training__mixed_precision_param": "float32",
                "parallelism__pipeline_parallel_degree": 4,
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
