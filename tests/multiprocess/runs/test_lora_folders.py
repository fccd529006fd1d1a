"""Runs with adapters from a Hugging Face folder to one: merged, and alone for peft.

The oracles are the run's own logits, a LLaMA written from the definition, and peft with
transformers.
"""

import json

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

peft = pytest.importorskip("peft", reason="peft is not installed: the extra lora has it")
from transformers import AutoModelForCausalLM  # noqa: E402 - peft needs it

N_STEPS = 3
# It has reordered heads, biases, and embeddings that are tied.
FAMILY = "qwen2"
TARGETS = ["wq", "layers.5.feed_forward.w2", "layers.0.attention.wv"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("lora_folders")


@pytest.fixture(scope="module")
def base(place):
    return write_folder(place / "base", FAMILIES[FAMILY], n_files=2)


@pytest.fixture(scope="module")
def tokens(place):
    torch.save(some_tokens(8, SEQ_LEN), place / "tokens.pt")
    return place / "tokens.pt"


@pytest.fixture(scope="module")
def seen(place, base, tokens):
    """What two ranks saw, emulated: begun, trained, and with some layers alone."""

    def scenario(name, **more):
        steps = more.pop("steps", None)
        settings = {**pipeline_size(1, 2), "freezing__method": "lora", "lora__rank": 4, **more}
        settings |= {"training__steps": steps or 1, "optimizer__lr": 2e-3}
        args = model_arguments(base, **settings)
        return {"name": name, "args": args, "tokens": str(tokens), "steps": steps}

    scenarios = [
        scenario("begun"),
        scenario("trained", steps=N_STEPS),
        scenario("some", steps=N_STEPS, lora__targets=",".join(TARGETS)),
    ]
    return run_scenarios(place, 1, scenarios, script="pipeline_logits.py", imports=["peft"])


def test_a_run_begins_with_the_model_of_its_folder(seen, base, tokens):
    expected = logits_of(base, torch.load(tokens))
    torch.testing.assert_close(the_logits(seen["begun"]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["trained", "some"])
def test_merged_it_computes_what_the_run_does(name, seen, place, base, tokens, tmp_path):
    folder = export_run(the_run(place, name), output=tmp_path / "merged")
    logits = the_logits(seen[name])
    assert (logits - logits_of(base, torch.load(tokens))).abs().max() > 0.05, "nothing was trained"
    torch.testing.assert_close(logits_of(folder, torch.load(tokens)), logits, atol=2e-4, rtol=0)
    before, after = read_folder(base)[1], read_folder(folder)[1]
    assert after.keys() == before.keys()
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    words = {"q_proj", "layers.5.mlp.down_proj", "layers.0.self_attn.v_proj"}
    expected = {n for n in before if n.endswith("proj.weight")}
    if name == "some":
        expected = {n for n in expected if any(n.endswith(f"{w}.weight") for w in words)}
    assert moved == expected


@pytest.mark.parametrize("name", ["trained", "some"])
def test_peft_loads_the_adapters_onto_the_folder(name, seen, place, base, tokens, tmp_path):
    folder = export_run(the_run(place, name), output=tmp_path / "adapter", adapter=True)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    assert len(settings["target_modules"]) == (7 if name == "trained" else 8)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    model = peft.PeftModel.from_pretrained(model, str(folder)).eval()
    with torch.no_grad():
        logits = model(torch.load(tokens)).logits
    assert (logits - the_logits(seen[name])).abs().max() < 1e-3


def test_adapters_of_a_run_without_any_are_refused(place, base, tmp_path):
    args = model_arguments(base, **pipeline_size(1, 2), training__steps=1)
    plain = {"name": "plain", "args": args, "tokens": None, "save": True}
    run_scenarios(tmp_path, 1, [plain], script="pipeline_logits.py")
    with pytest.raises(ValueError, match="has no adapters"):
        export_run(the_run(tmp_path, "plain"), adapter=True)
