"""Pipelines with adapters learn what peft's model learns in one process, and go on when resumed.

The oracle is peft itself, in the whole model, with torch's backward. Ranks are emulated, but for
one run in two processes and one in four, which is sharded.
"""

import json
from contextlib import nullcontext

import pytest
import torch
from launcher import EMULATED, SCHEDULES, arguments, asked_for, merged, run_scenarios
from one_process import IGNORED
from run_scenarios import FLAVORS, fix_weights
from saving import SAVED, resumed_from
from torch.nn.functional import cross_entropy
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

peft = pytest.importorskip("peft", reason="peft is not installed: the extra lora has it")

RANK, STEPS, STOP = 4, 3, 1
SPLIT = "ZBVZeroBubble"  # its last stage has no layer that gets an adapter
CASES = [
    pytest.param(s, marks=[] if s in ("1F1B", SPLIT) else [pytest.mark.long]) for s in SCHEDULES
]
KINDS = {
    "recomputed": {"activation_checkpoint__mode": "full"},
    "bf16": {"training__mixed_precision_param": "bfloat16"},
    "compiled": {"compile__enable": None, "compile__backend": "aot_eager"},
}
KIND_CASES = [
    pytest.param(kind, marks=[pytest.mark.long] if kind == "compiled" else []) for kind in KINDS
]
SHARDED = {"parallelism__data_parallel_shard_degree": 2}


def scenario(name, schedule=SPLIT, *, emulated=True, n_steps=1, own=(), **settings):
    settings = {
        "model__flavor": "short",
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_schedule": schedule,
        "training__steps": n_steps,
        "freezing__method": "lora",
        "lora__rank": RANK,
        "debug__seed": 7,
        **SAVED,
        **(EMULATED if emulated else {}),
        **settings,
    }
    return {"name": name, "args": arguments(**settings), "save_at": [], **dict(own)}


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    scenarios = [scenario(s, s) for (s,) in asked_for(request, "schedule")]
    scenarios += [scenario(k, "1F1B", **KINDS[k]) for (k,) in asked_for(request, "kind")]
    drawn = {"fixed_weights": False}
    rates = {"optimizer__lr": 1e-5, "lora__learning_rate": 1e-2}
    whole = scenario("whole", n_steps=STEPS, own={**drawn, "save_at": [STOP]}, optimizer__lr=1e-3)
    going_on = scenario(
        "resumed",
        n_steps=STEPS,
        own={**drawn, "after": "whole"},
        optimizer__lr=1e-3,
        **resumed_from(folder / "whole" / "checkpoint" / f"step-{STOP}"),
    )
    rated = scenario("rated", n_steps=STEPS, own=drawn, **rates)
    return run_scenarios(folder, 1, [*scenarios, whole, rated, going_on], imports=["peft"])


def one_process(replicas, *, casts=False):
    """Return the weights, gradients and loss of peft's model, of the mean loss over all tokens."""
    seq_len = replicas[0][0].shape[1]
    model = Transformer(TransformerModelArgs(**FLAVORS["short"], max_seq_len=seq_len))
    targets = ["wq", "wk", "wv", "wo", "w1", "w2", "w3"]
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets)
    peft.inject_adapter_in_model(config, model)
    fix_weights([model])
    n_tokens = sum(int((labels != IGNORED).sum()) for _, labels in replicas)
    loss = 0.0
    for inputs, labels in replicas:
        with torch.autocast("cpu", torch.bfloat16) if casts else nullcontext():
            logits = model(inputs).float().flatten(0, 1)
        loss += cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORED)
    (loss / n_tokens).backward()
    weights = dict(model.named_parameters())
    return weights, {n: p.grad for n, p in weights.items() if p.requires_grad}, float(loss.detach())


def assert_learned_as(ranks, replicas, *, casts=False):
    before, expected, _ = one_process(replicas, casts=casts)
    gradients, after = merged(ranks, "gradients"), merged(ranks, "weights")
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = (0.05 if casts else 1e-4) * float(gradient.abs().max())
        assert scale > 0.0, name
        torch.testing.assert_close(gradients[name], gradient, atol=scale, rtol=0, msg=name)
    stay = [n for n in before if n not in expected]
    # Under autocast frozen weights are of its type from the start.
    assert all(torch.equal(after[n], before[n].to(after[n].dtype)) for n in stay)
    assert not any(torch.equal(after[n], before[n]) for n in expected)


@pytest.mark.parametrize("schedule", CASES)
def test_gradients_are_those_of_peft_and_base_weights_stay(runs, schedule):
    (seen,) = runs[schedule]
    assert_learned_as([seen], [(seen["batches"][0], seen["labels"][0])])


@pytest.mark.parametrize("kind", KIND_CASES)
def test_so_they_are_in_every_kind_of_block(runs, kind):
    (seen,) = runs[kind]
    rows = [(seen["batches"][0], seen["labels"][0])]
    assert_learned_as([seen], rows, casts=kind == "bf16")


def test_adapters_learn_ten_times_as_fast_unless_told_otherwise(runs):
    (whole,), (rated,) = runs["whole"], runs["rated"]
    assert whole["losses"][0] > whole["losses"][-1]
    assert rated["losses"] == whole["losses"]
    assert rated["grad_norms"] == whole["grad_norms"]


def test_a_resumed_run_equals_the_undisturbed_one(runs):
    (whole,), (resumed,) = runs["whole"], runs["resumed"]
    assert resumed["losses"] == whole["losses"][STOP:]
    assert resumed["grad_norms"] == whole["grad_norms"][STOP:]
    left, right = resumed["weights"], whole["weights"]
    assert [name for name in right if not torch.equal(left[name], right[name])] == []


def assert_counts_trained(folder, weights):
    (summary,) = folder.glob("tb/*/summary.json")
    told = json.loads(summary.read_text())
    sizes = {name: weight.numel() for name, weight in weights.items()}
    assert told["parameters"] == sum(sizes.values())
    assert told["parameters_trained"] == sum(n for name, n in sizes.items() if ".lora_" in name)


def test_ranks_of_their_own_begin_and_learn_the_same(runs, tmp_path):
    drawn = {"fixed_weights": False}
    real = scenario("real", emulated=False, n_steps=STEPS, own=drawn, optimizer__lr=1e-3)
    ranks = run_scenarios(tmp_path, 2, [real], imports=["peft"])["real"]
    (whole,) = runs["whole"]
    assert ranks[0]["losses"] == whole["losses"]  # of a V, rank 0 has the loss
    weights = merged(ranks, "weights")
    assert [n for n in weights if not torch.equal(weights[n], whole["weights"][n])] == []
    assert_counts_trained(tmp_path / "real", weights)


def test_shards_of_a_pipeline_learn_the_same(tmp_path):
    sharded = scenario("sharded", emulated=False, training__seq_len=128, **SHARDED)
    ranks = run_scenarios(tmp_path, 4, [sharded], imports=["peft"])["sharded"]
    assert_learned_as(ranks, [(s["batches"][0], s["labels"][0]) for s in ranks[:2]])
    assert_counts_trained(tmp_path / "sharded", merged(ranks, "weights"))
