"""Hugging Face folders through pipelines: what is read, what comes out, and what is exported.

The oracle is a LLaMA written from the definition, in ``tests/torchtitan/helpers/hf_models.py``, and
transformers itself where it is installed. Real weights are read from the folder that the variable
TIMELYFREEZE_SMOLLM2 names.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hf_runs import SEQ_LEN, model_arguments, pipeline_size, the_logits, the_run
from launcher import run_scenarios

from tests.torchtitan.helpers.hf_models import (
    FAMILIES,
    logits_of,
    read_folder,
    some_tokens,
    write_folder,
)
from torchtitan.hf.export import export_run

SMOLLM2 = os.environ.get("TIMELYFREEZE_SMOLLM2", "")
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)
needs_smollm2 = pytest.mark.skipif(
    not SMOLLM2, reason="TIMELYFREEZE_SMOLLM2 names no folder with SmolLM2-135M"
)
N_ROWS = 8
# {name: (processes, ranks of the pipeline)}
FORMS = {"1ranks": (1, 1), "2ranks": (2, 2), "4ranks": (4, 4), "emulated": (1, 4)}
# The other forms come to the same code by other ways.
FORM_CASES = [
    pytest.param(form, marks=[] if form == "2ranks" else [pytest.mark.long]) for form in FORMS
]
# How each family lies on disk.
N_FILES = {
    "llama2": 3,
    "llama3": 1,
    "llama31": 2,
    "llama32": 3,
    "smollm2": 1,
    "mistral": 2,
    "qwen2": 3,
    "qwen3": 1,
}
# Two shards cut the heads of the last but one, and the norms of heads of the last.
SHARDED = ["llama32", "qwen2", "smollm2", "qwen3"]
V_SHAPED = "ZBVZeroBubble"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    made = {
        name: write_folder(place / name, FAMILIES[name], n_files=n) for name, n in N_FILES.items()
    }
    made["bf16"] = write_folder(place / "bf16", FAMILIES["llama32"], dtype=torch.bfloat16)
    return made


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens.pt"
    torch.save(some_tokens(N_ROWS, SEQ_LEN), path)
    return path


@pytest.fixture(scope="module", params=FORM_CASES)
def seen(request, folders, tokens, tmp_path_factory):
    """What every process saw, by scenario; and where the runs lie."""
    n_processes, n = FORMS[request.param]
    place = tmp_path_factory.mktemp(request.param)
    size = pipeline_size(n_processes, n)
    scenarios = [
        {"name": name, "args": model_arguments(folders[name], **size), "tokens": str(tokens)}
        for name in N_FILES
    ]
    scenarios += [
        {
            "name": "saved",
            "args": model_arguments(folders["bf16"], **size, training__dtype="bfloat16"),
            "tokens": None,
            "save": True,
        },
        {
            "name": "trained",
            "args": model_arguments(
                folders["llama32"],
                **size,
                training__steps=3,
                optimizer__lr=1e-2,
                checkpoint__interval=2,
            ),
            "tokens": str(tokens),
            "steps": 3,
        },
    ]
    scenarios.append({**scenarios[-1], "name": "resumed", "resumes": "trained", "after": "trained"})
    if n > 1:
        scenarios += [
            {
                "name": schedule,
                "args": model_arguments(
                    folders["smollm2"],
                    **size,
                    parallelism__pipeline_parallel_schedule=schedule,
                ),
                "tokens": str(tokens),
            }
            for schedule in ("GPipe", "Interleaved1F1B", V_SHAPED)
            if not (n == 4 and schedule == "Interleaved1F1B")
        ]
    if n_processes == 4:
        size = {
            "parallelism__pipeline_parallel_degree": 2,
            "parallelism__data_parallel_shard_degree": 2,
        }
        scenarios += [
            {
                "name": f"sharded {family}",
                "args": model_arguments(folders[family], **size),
                "tokens": str(tokens),
            }
            for family in SHARDED
        ]
    ranks = run_scenarios(place, n_processes, scenarios, script="pipeline_logits.py", timeout_s=600)
    return ranks, place


@pytest.mark.parametrize("family", N_FILES)
def test_logits_are_those_of_the_definition(seen, folders, tokens, family):
    ranks, _ = seen
    expected = logits_of(folders[family], torch.load(tokens))
    torch.testing.assert_close(the_logits(ranks[family]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", V_SHAPED])
def test_logits_do_not_depend_on_the_schedule(seen, folders, tokens, schedule):
    ranks, _ = seen
    if schedule not in ranks:
        pytest.skip("not run on this number of ranks")
    expected = logits_of(folders["smollm2"], torch.load(tokens))
    torch.testing.assert_close(the_logits(ranks[schedule]), expected, atol=1e-4, rtol=0)


def test_a_rank_reads_its_own_tensors_and_no_others(seen, folders):
    ranks, _ = seen
    for family in N_FILES:
        weights = read_folder(folders[family])[1]
        tied = "lm_head.weight" not in weights
        read = [name for rank in ranks[family] for name, _ in rank["read"]]
        # A tied embedding is read once for each of its two places.
        twice = ["model.embed_tokens.weight"] if tied else []
        assert sorted(read) == sorted([*weights, *twice])
        for rank in ranks[family]:
            assert len(rank["read"]) == len(rank["dtypes"])
            assert all(n == weights[name].numel() for name, n in rank["read"])


def test_a_v_shaped_pipeline_unties_on_one_rank(seen, folders):
    ranks, _ = seen
    if V_SHAPED not in ranks:
        pytest.skip("needs a pipeline")
    embedding = read_folder(folders["smollm2"])[1]["model.embed_tokens.weight"]
    first, *others = ranks[V_SHAPED]
    assert torch.equal(first["tok_embeddings"], embedding)
    assert torch.equal(first["output"], embedding)
    assert all("output" not in rank for rank in others)


def test_weights_have_the_type_that_training_asks_for(seen):
    ranks, _ = seen
    assert {t for rank in ranks["saved"] for t in rank["dtypes"].values()} == {"torch.bfloat16"}
    assert {t for rank in ranks["llama2"] for t in rank["dtypes"].values()} == {"torch.float32"}


def test_loaded_and_exported_is_the_same_to_the_last_bit(seen, folders, tmp_path):
    _, place = seen
    folder = export_run(the_run(place, "saved"), output=tmp_path / "exported")
    (before, weights), (after, exported) = read_folder(folders["bf16"]), read_folder(folder)
    assert exported.keys() == weights.keys()
    for name, weight in weights.items():
        assert exported[name].dtype == weight.dtype
        assert torch.equal(exported[name], weight), name
    assert after["tie_word_embeddings"] is before["tie_word_embeddings"] is True


@pytest.fixture
def trained(seen, tmp_path):
    """The folder of a run that trained, and the logits of the model when it ended."""
    ranks, place = seen
    folder = export_run(the_run(place, "trained"), output=tmp_path / "exported")
    return folder, the_logits(ranks["trained"])


def test_a_trained_model_computes_the_same_from_its_folder(trained, folders, tokens):
    folder, logits = trained
    before = logits_of(folders["llama32"], torch.load(tokens))
    assert (logits - before).abs().max() > 0.1, "nothing was trained"
    torch.testing.assert_close(logits_of(folder, torch.load(tokens)), logits, atol=1e-4, rtol=0)


def test_a_resumed_run_goes_on_from_its_checkpoint_and_not_from_the_folder(seen):
    ranks, _ = seen
    assert all(rank["read"] for rank in ranks["trained"])
    assert not any(rank["read"] for rank in ranks["resumed"])
    assert torch.equal(the_logits(ranks["resumed"]), the_logits(ranks["trained"]))


@pytest.mark.parametrize("family", SHARDED)
def test_shards_of_stages_are_loaded_too(seen, folders, tokens, family):
    ranks, _ = seen
    if f"sharded {family}" not in ranks:
        pytest.skip("needs 4 ranks")
    expected = logits_of(folders[family], torch.load(tokens))
    replicas = [rank["logits"] for rank in ranks[f"sharded {family}"] if rank["logits"] is not None]
    assert len(replicas) == 2
    for logits in replicas:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


# -- transformers ----------------------------------------------------------------------------------


@torch.no_grad()
def transformers_logits(folder, tokens):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval()(tokens).logits


@needs_transformers
@pytest.mark.parametrize("family", N_FILES)
def test_logits_are_those_of_transformers(seen, folders, tokens, family):
    ranks, _ = seen
    expected = transformers_logits(folders[family], torch.load(tokens))
    assert (the_logits(ranks[family]) - expected).abs().max() < 1e-3


@needs_transformers
def test_transformers_loads_what_was_trained_and_exported(trained, tokens, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder, logits = trained
    assert (transformers_logits(folder, torch.load(tokens)) - logits).abs().max() < 1e-3


@needs_smollm2
@needs_transformers
@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_real_weights_compute_as_in_transformers(form, tmp_path):
    n_processes, n = FORMS[form]
    path = tmp_path / "tokens.pt"
    torch.save(some_tokens(4, 64, vocabulary=49152), path)
    scenario = {
        "name": "smollm2",
        "args": model_arguments(
            SMOLLM2,
            model__flavor="SmolLM2-135M",
            model__hf_assets_path=SMOLLM2,
            **pipeline_size(n_processes, n),
            training__seq_len=64,
            training__local_batch_size=4,
            parallelism__pipeline_parallel_microbatch_size=1,
        ),
        "tokens": str(path),
        "save": True,
    }
    ranks = run_scenarios(tmp_path, n_processes, [scenario], script="pipeline_logits.py")["smollm2"]
    expected = transformers_logits(SMOLLM2, torch.load(path))
    assert (the_logits(ranks) - expected).abs().max() < 1e-3
    folder = export_run(the_run(tmp_path, "smollm2"), dtype=torch.bfloat16)
    weights, exported = read_folder(Path(SMOLLM2))[1], read_folder(folder)[1]
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
