"""Runs of ``pipeline_logits.py`` that begin from a Hugging Face folder, and what they saw."""

from launcher import ROOT, arguments

SEQ_LEN = 96


def pipeline_size(n_processes, n_ranks):
    emulated = {"emulation__enable": None} if n_processes < n_ranks else {}
    return {"parallelism__pipeline_parallel_degree": n_ranks, **emulated}


def model_arguments(folder, **settings):
    return arguments(
        **{
            "model__flavor": "hf",
            "model__hf_assets_path": str(ROOT / "tests/assets/tokenizer"),
            "checkpoint__enable": None,
            "checkpoint__initial_load_in_hf": None,
            "checkpoint__initial_load_path": str(folder),
            "training__seq_len": SEQ_LEN,
            **settings,
        }
    )


def the_logits(ranks):
    (logits,) = [seen["logits"] for seen in ranks if seen["logits"] is not None]
    return logits.float()


def the_run(place, name):
    settings = min((place / name / "tb").glob("*/settings.json"))  # the first, if it was resumed
    return settings.parent
