"""Adapters learn first, then all weights, in one run: what it learns, and how it goes on.

The oracle is peft, which merges the adapters of a checkpoint, and AdamW in one process.
"""

import pytest
import torch
from faults import equal_weights, run_with
from launcher import EMULATED, arguments, asked_for, run_scenarios
from one_process import IGNORED
from run_scenarios import FLAVORS, add_tiny_flavors
from saving import SAVED, resumed_from
from torch.nn.functional import cross_entropy
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

from tests.torchtitan.helpers.hf_models import logits_of
from timelyfreeze.records.summary import read_summary
from timelyfreeze.records.tables import MOVES, STEPS
from torchtitan.hf.export import export_run
from torchtitan.hf.flavors import EXTRA_FLAVORS
from torchtitan.hf.weights import StoredWeights
from torchtitan.lora.adapters import is_adapter

peft = pytest.importorskip("peft", reason="peft is not installed: the extra lora has it")

RANK, UNTIL, N_STEPS = 4, 3, 7
BOTH_SIDES = [2, 3, 4]  # of the switch; after step 3 adapters are still there
# The planned run stops at the switch, before its plan, and behind that.
STOPS = [("first", step) for step in BOTH_SIDES] + [("planned", 7)]
STOPS += [pytest.param("planned", step, marks=[pytest.mark.long]) for step in (3, 13)]
# Monitoring is in steps 6 to 11, the ramp in 12 and 13.
PLANNED = {
    "freezing__method": "timelyfreeze",
    "freezing__last_warmup_step": 2,
    "freezing__last_monitor_step": 8,
    "freezing__last_ramp_step": 10,
    "freezing__discard_batches": 1,
    "freezing__gradient_rank": [2, 4, 8],
    "training__steps": 16,
}
PHASES = ["warmup"] * 2 + ["upper_bound"] * 3 + ["lower_bound"] * 3 + ["ramp"] * 2 + ["stable"] * 3
SPLIT = "ZBVZeroBubble"


def scenario(name, *, own=(), **settings):
    settings = {
        "model__flavor": "short",
        "parallelism__pipeline_parallel_degree": 2,
        "training__steps": N_STEPS,
        "training__mixed_precision_param": "float32",
        "optimizer__lr": 1e-3,
        "lora__rank": RANK,
        "lora__until": UNTIL,
        **SAVED,
        **EMULATED,
        **settings,
    }
    settings = {key: value for key, value in settings.items() if value is not False}
    plans = settings.get("freezing__method") == "timelyfreeze"
    known = {"name": name, "args": arguments(**settings), "is_elastic": False, "fake_clock": plans}
    return {**known, "save_at": [], **dict(own)}


def going_on(folder, name, step, **settings):
    start = resumed_from(folder / name / "checkpoint" / f"step-{step}")
    own = {"resumes": True, "after": name}
    return scenario(f"{name} from {step}", own=own, **settings, **start)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters_first")


@pytest.fixture(scope="module")
def runs(request, folder):
    alone = {"lora__until": 0}
    planned = {**PLANNED, "parallelism__pipeline_parallel_schedule": SPLIT}
    scenarios = [
        scenario("first", own={"save_at": BOTH_SIDES}),
        scenario("planned", own={"save_at": [3, 7, 13]}, **planned),
        scenario("lora", freezing__method="lora", **alone),
        scenario("none", **alone),
        *(
            going_on(folder, name, step, **(planned if name == "planned" else {}))
            for name, step in asked_for(request, "name", "step")
        ),
    ]
    return run_scenarios(folder, 1, scenarios, script="elastic_run.py", imports=["peft"])


def losses(ranks):
    return [loss for seen in ranks for _, loss in seen["losses"]]


def test_adapters_learn_as_alone_and_rows_and_rates_go_on(runs):
    (first,), (lora,), (none,) = (runs[name] for name in ("first", "lora", "none"))
    assert losses([first])[:UNTIL] == losses([lora])[:UNTIL]
    # What is merged computes the same, and learns otherwise.
    assert losses([first])[UNTIL] == pytest.approx(losses([lora])[UNTIL], rel=1e-6)
    assert losses([first])[-1] != pytest.approx(losses([lora])[-1], rel=1e-4)
    assert first["rows"] == none["rows"] == lora["rows"]
    rates = dict(none["rates"])
    assert first["rates"][:UNTIL] == lora["rates"][:UNTIL]
    warmed = [(step, rates[step] * min(1.0, (step - UNTIL) / 3)) for step in range(4, 8)]
    assert first["rates"][UNTIL:] == [(step, pytest.approx(rate)) for step, rate in warmed]


def peft_model(checkpoint):
    """Return the model of a checkpoint with adapters, merged by peft."""
    model = Transformer(TransformerModelArgs(**FLAVORS["short"], max_seq_len=32))
    targets = ["wq", "wk", "wv", "wo", "w1", "w2", "w3"]
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets)
    model = peft.LoraModel(model, config, "default")
    stored = StoredWeights(checkpoint)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            parameter.copy_(read(stored, name.replace("base_layer.", "")))
    return model.merge_and_unload().requires_grad_(True)


def read(stored, name):
    """Return a tensor of a checkpoint as it is: its adapter is worth nothing with a scale of 0."""
    stored._adapter_scale = 0.0
    return stored.load([name])[name]


def test_all_weights_learn_from_what_peft_merges(runs, folder):
    """With AdamW written out here, and fresh moments."""
    (first,) = runs["first"]
    model = peft_model(folder / "first/checkpoint" / f"step-{UNTIL}")
    settings = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    found = []
    for step in range(UNTIL, N_STEPS):
        optimizer.param_groups[0]["lr"] = first["rates"][step][1]
        optimizer.zero_grad()
        logits, labels = model(first["inputs"][step]).float().flatten(0, 1), first["labels"][step]
        loss = cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        found.append(float(loss.detach()))
        optimizer.step()
    assert losses([first])[UNTIL:] == pytest.approx(found, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(first["weights"][name], parameter, atol=2e-5, rtol=0, msg=name)


@pytest.mark.parametrize(("name", "step"), STOPS)
def test_a_resumed_run_is_bit_for_bit_the_undisturbed_one(runs, name, step):
    (whole,), (resumed,) = runs[name], runs[f"{name} from {step}"]
    assert len(resumed["losses"]) > 0
    for key in ("losses", "rates", "rows", "phases", "masks"):
        assert resumed[key] == [row for row in whole[key] if row[0] > step], key
    assert resumed["plans"] == whole["plans"]
    for key in ("weights", "moments"):
        torch.testing.assert_close(resumed[key], whole[key], rtol=0, atol=0)


def test_phases_are_counted_from_the_switch(runs):
    (seen,) = runs["planned"]
    assert seen["phases"] == list(enumerate(PHASES, UNTIL + 1))
    assert sum(seen["plans"][0].values()) > 0.0


@pytest.mark.usefixtures("runs")
def test_checkpoints_have_adapters_before_and_plain_weights_after(folder):
    for step in BOTH_SIDES:
        stored = StoredWeights(folder / "first/checkpoint" / f"step-{step}")
        assert stored.has_adapters == (step <= UNTIL)


@pytest.fixture
def _flavors(monkeypatch):
    """Make the flavors of the runs known in this process, too."""
    monkeypatch.setitem(EXTRA_FLAVORS, "llama3", dict(EXTRA_FLAVORS["llama3"]))
    add_tiny_flavors()


@pytest.mark.usefixtures("_flavors")
def test_checkpoints_of_both_halves_are_exported(runs, folder, tmp_path):
    (written,) = (folder / "first/tb").iterdir()
    tokens = runs["first"][0]["inputs"][0]
    switch, later = (
        logits_of(export_run(written, step, output=tmp_path / str(step)), tokens)
        for step in (UNTIL, UNTIL + 1)
    )
    with torch.no_grad():
        expected = peft_model(folder / "first/checkpoint" / f"step-{UNTIL}")(tokens)
    torch.testing.assert_close(switch, expected, atol=2e-4, rtol=0)
    assert (later - switch).abs().max() > 1e-3


@pytest.mark.usefixtures("runs")
def test_what_is_written_says_which_steps_were_of_adapters(folder):
    (written,) = (folder / "planned/tb").iterdir()
    phases = [row.phase for row in STEPS.read(written)]
    assert phases == ["adapters"] * UNTIL + PHASES
    summary, (move,) = read_summary(written), MOVES.read(written)
    assert (summary.method, summary.adapters_until) == ("lora+timelyfreeze", UNTIL)
    assert (move.step, move.ranks, move.split) == (UNTIL + 1, 2, "")
    assert summary.virtual_step_ms_adapters > 0.0
    report, page = ((written / name).read_text() for name in ("report.txt", "report.md"))
    assert "adapters first           up to step 3, " in report
    assert "parameters up to step 3, then all\n" in report
    assert "moved" not in report
    assert "lora.until | 3 |" in page


def test_shards_merge_the_same(tmp_path):
    """Two processes, each with a half of every tensor, without a pipeline."""
    shards = {"parallelism__pipeline_parallel_degree": 1, "emulation__enable": False}
    shards |= {"parallelism__data_parallel_shard_degree": 2, "training__local_batch_size": 4}
    alone = scenario("lora", freezing__method="lora", **{**shards, "lora__until": 0})
    scenarios = [scenario("sharded", **shards), alone]
    ranks = run_scenarios(tmp_path, 2, scenarios, script="elastic_run.py", imports=["peft"])
    for first, lora in zip(ranks["sharded"], ranks["lora"], strict=True):
        assert losses([first])[:UNTIL] == losses([lora])[:UNTIL]
        assert losses([first])[UNTIL] == pytest.approx(losses([lora])[UNTIL], rel=1e-6)
        assert losses([first])[-1] != losses([lora])[-1]
        assert not any(is_adapter(name) for name in first["weights"])


STOPPED = {
    "freezing__method": "none",
    "lora__rank": RANK,
    "lora__until": UNTIL,
    "training__steps": N_STEPS,
    "checkpoint__interval": 99,
}


@pytest.fixture(scope="module")
def in_two_processes(folder):
    assert run_with({}, folder / "two", **STOPPED).status == 0
    return folder / "two"


@pytest.mark.parametrize(
    "place", ["hand_over", pytest.param("take_over", marks=[pytest.mark.long])]
)
def test_a_signal_to_stop_at_the_switch_loses_nothing(place, in_two_processes, tmp_path):
    """In two processes: the run stops after its next step, and the same command goes on."""
    stopped = tmp_path / "stopped"
    fault = {"at": place, "rank": 1, "signal": "SIGTERM", "to": "agent"}
    run = run_with(fault, stopped, **STOPPED)
    told = f"stopped by SIGTERM after step {UNTIL + 1} of {N_STEPS}; its checkpoint is saved"
    assert told in run.output, run.output[-4000:]
    assert run_with({}, stopped, **STOPPED).status == 0
    assert equal_weights(stopped, in_two_processes)
