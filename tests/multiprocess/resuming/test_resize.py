"""A run that goes on with more replicas, and then with fewer, equals one that never stopped.

Two replicas with microbatches of one example see what a plain pipeline sees with microbatches of
two examples (see ``test_hybrid``): so the same run can go on in either form. Stopped twice, in two
phases, it has to see the same examples in the same steps, freeze the same tensors and come to the
same weights. Plain pipelines are emulated.
"""

import itertools
import json

import pytest
from launcher import EMULATED, ROOT, arguments, asked_for, assert_near, merged, run_scenarios
from methods import ROWS, Row
from test_hybrid import APF, SETTINGS

SUBSPACES = "timelyfreeze in subspaces"
METHODS = {
    **{example.method: example for example in ROWS},
    SUBSPACES: Row("timelyfreeze", {"freezing__gradient_rank": [2, 4, 8]}),
}
# Steps at which a run goes on with twice as many processes, and then with half of them; phases are
# those of the table of methods.
UP, DOWN = "up", "down"
CHAINS = {
    "timelyfreeze: warm-up, lower bound": ("timelyfreeze", 1, 5),
    "timelyfreeze: upper bound, ramp": ("timelyfreeze", 3, 8),
    "timelyfreeze+apf: upper bound, ramp": ("timelyfreeze+apf", 3, 7),
    f"{SUBSPACES}: upper bound, ramp": (SUBSPACES, 3, 8),
    "timelyfreeze+autofreeze: lower bound, stable": ("timelyfreeze+autofreeze", 5, 11),
    # From the first step on, so that some tensors have never been updated.
    "fixed: stable": ("fixed", 3, 7),
}
SPLIT = "timelyfreeze: split within tensors"  # by tensor parallelism, in place of replicas
HYBRID = "timelyfreeze: replicated and sharded"  # four replicas, of which two share tensors
ACCUMULATED = "timelyfreeze: accumulated"  # half as many examples at a time, twice
ENDING = "timelyfreeze: examples of one replica end"
PLAIN = {
    **EMULATED,
    "training__local_batch_size": 16,
    "parallelism__pipeline_parallel_microbatch_size": 2,
}
REPLICATED = {"parallelism__data_parallel_shard_degree": 2}
HYBRID_PLAIN = {**PLAIN, "parallelism__pipeline_parallel_microbatch_size": 4}
HYBRID_REPLICATED = {
    **REPLICATED,
    "parallelism__data_parallel_replicate_degree": 2,
    "training__local_batch_size": 4,
}
N_ROWS = 101


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where everything is, with so few short examples that epochs end between two batches."""
    folder = tmp_path_factory.mktemp("resize")
    examples = (ROOT / "tests/assets/tiny_instruct/train.jsonl").read_text().splitlines()
    short = sorted(examples, key=lambda example: len("".join(json.loads(example).values())))[
        :N_ROWS
    ]
    (folder / "examples.jsonl").write_text("\n".join(short) + "\n")
    return folder


def scenario(folder, name, method, save_at=(), resumes=None, **settings):
    saved = {}
    if resumes is not None:
        saved = {
            "checkpoint__initial_load_path": folder / resumes,
            "checkpoint__no_initial_load_model_only": None,
        }
    from_the_start = {"freezing__last_warmup_step": 0} if method == "fixed" else {}
    own = {**SETTINGS, **METHODS[method].arguments, **APF, **from_the_start, **settings, **saved}
    del own["data__no_shuffle"]
    return {
        "name": name,
        "fake_clock": True,
        "fixed_weights": resumes is None,
        "save_at": list(save_at),
        "args": arguments(
            **own,
            training__dataset_path=folder / "examples.jsonl",
            training__global_batch_size=16,
            checkpoint__enable=None,
            checkpoint__keep_latest_k=0,
        ),
    }


BASE = "timelyfreeze: upper bound, ramp"  # for what goes on in other ways
SHORT = [BASE]
LEGS = [
    pytest.param((name, leg), marks=[] if name in SHORT else [pytest.mark.long], id=f"{name} {leg}")
    for name in [*CHAINS, SPLIT, HYBRID]
    for leg in (UP, DOWN)
]


@pytest.fixture(scope="module")
def chains(request):
    """The chains that are asked for, and the base of others."""
    asked = {BASE, *(name for ((name, _),) in asked_for(request, "leg"))}
    return {name: chain for name, chain in CHAINS.items() if name in asked}


def split_is_asked(request):
    return SPLIT in {name for ((name, _),) in asked_for(request, "leg")}


@pytest.fixture(scope="module")
def whole(folder, chains):
    """Undisturbed runs of two ranks, which save where others go on."""
    places = {}
    for method, up, _ in chains.values():
        places.setdefault(method, set()).add(up)
    scenarios = [
        scenario(folder, method, method, sorted(steps), **PLAIN) for method, steps in places.items()
    ]
    return run_scenarios(folder / "whole", 1, scenarios, timeout_s=900)


@pytest.fixture(scope="module")
def larger(request, folder, chains, whole):
    """The same with two processes for each stage, from where the plain ones were."""
    scenarios = [
        scenario(folder, name, method, [down], f"whole/{method}/checkpoint/step-{up}", **REPLICATED)
        for name, (method, up, down) in chains.items()
    ]
    if split_is_asked(request):
        split = {k: v for k, v in PLAIN.items() if k not in EMULATED}
        split["parallelism__tensor_parallel_degree"] = 2
        saved = "whole/timelyfreeze/checkpoint/step-3"
        scenarios.append(scenario(folder, SPLIT, "timelyfreeze", [8], saved, **split))
    ending = scenario(folder, ENDING, "timelyfreeze", **REPLICATED)
    scenarios.append({**ending, "n_batches": [5, 3]})
    return run_scenarios(folder / "larger", 4, scenarios, timeout_s=900)


@pytest.fixture(scope="module")
def smaller(request, folder, chains, larger):
    """And these in plain pipelines again."""
    scenarios = [
        scenario(folder, name, method, (), f"larger/{name}/checkpoint/step-{down}", **PLAIN)
        for name, (method, _, down) in chains.items()
    ]
    if split_is_asked(request):
        saved = f"larger/{SPLIT}/checkpoint/step-8"
        scenarios.append(scenario(folder, SPLIT, "timelyfreeze", (), saved, **PLAIN))
    method, _, down = CHAINS[BASE]
    accumulated = {**EMULATED, "training__local_batch_size": 8}
    saved = f"larger/{BASE}/checkpoint/step-{down}"
    scenarios.append(scenario(folder, ACCUMULATED, method, (), saved, **accumulated))
    return run_scenarios(folder / "smaller", 1, scenarios, timeout_s=900)


@pytest.fixture(scope="module")
def hybrid(folder):
    """One chain from two ranks to eight and back."""
    method, up, down = "timelyfreeze", 3, 8
    begun = scenario(folder, "begun", method, [up], **HYBRID_PLAIN)
    seen = run_scenarios(folder / "hybrid", 1, [begun])
    saved = f"hybrid/begun/checkpoint/step-{up}"
    larger = scenario(folder, UP, method, [down], saved, **HYBRID_REPLICATED)
    seen |= run_scenarios(folder / "hybrid", 8, [larger], timeout_s=600)
    saved = f"hybrid/{UP}/checkpoint/step-{down}"
    smaller = scenario(folder, DOWN, method, (), saved, **HYBRID_PLAIN)
    return seen | run_scenarios(folder / "hybrid", 1, [smaller])


def test_all_replicas_end_where_the_examples_of_one_do(folder, larger):
    """Without being told, the one with more examples would wait for the other to a time limit."""
    assert [len(seen["losses"]) for seen in larger[ENDING]] == [3] * 4
    assert [seen["step"] for seen in larger[ENDING]] == [3] * 4
    assert (folder / "larger" / ENDING / "checkpoint" / "step-3" / ".metadata").is_file()


@pytest.fixture
def leg(request):
    """Method, step after which it was stopped, the run that goes on, and the undisturbed one."""
    name, leg = request.param
    method, up, down = CHAINS.get(name, ("timelyfreeze", 3, 8))
    stop = up if leg == UP else down
    if name == HYBRID:
        ran = request.getfixturevalue("hybrid")
        return method, stop, ran[leg], ran["begun"]
    ran = request.getfixturevalue("larger" if leg == UP else "smaller")
    return method, stop, ran[name], request.getfixturevalue("whole")[method]


def replicas_of(ranks):
    """Return what one process of each replica saw."""
    return list({tuple(seen["batches"][0][0].tolist()): seen for seen in ranks}.values())


def steps_of(ranks, batches_per_step=1):
    """Return the examples of every step, sorted: those of all replicas together."""
    replicas = replicas_of(ranks)
    steps = [[] for _ in range(len(replicas[0]["batches"]) // batches_per_step)]
    for seen in replicas:
        for number, batch in enumerate(seen["batches"]):
            steps[number // batches_per_step] += map(tuple, batch.tolist())
    return [sorted(step) for step in steps]


@pytest.mark.parametrize("leg", LEGS, indirect=True)
def test_it_sees_the_examples_that_were_not_yet_seen_in_the_same_steps(leg):
    _, stop, resumed, undisturbed = leg
    assert steps_of(resumed) == steps_of(undisturbed)[stop:]


def test_an_epoch_has_every_example_once(whole):
    examples = list(itertools.chain.from_iterable(steps_of(whole["timelyfreeze"])))
    assert len(set(examples)) == N_ROWS < len(examples)
    assert {examples.count(example) for example in examples} == {1, 2}


def test_accumulated_steps_see_the_same_examples(whole, smaller):
    _, _, down = CHAINS[BASE]
    assert steps_of(smaller[ACCUMULATED], 2) == steps_of(whole["timelyfreeze"])[down:]
    assert smaller[ACCUMULATED][0]["plan"].keys() == whole["timelyfreeze"][0]["plan"].keys()


@pytest.mark.parametrize("leg", LEGS, indirect=True)
def test_it_freezes_what_it_would_have_frozen(leg):
    method, stop, resumed, undisturbed = leg
    wanted = {
        (step, stage): mask
        for seen in undisturbed
        for step, stage, mask in seen["masks"]
        if step > stop
    }
    assert any(any(mask) for masks in wanted.values() for mask in masks.values())
    for seen in resumed:
        assert seen["masks"]
        for step, stage, mask in seen["masks"]:
            assert mask == wanted[step, stage], f"step {step}, stage {stage}"
        assert seen["decided"] == [d for d in undisturbed[0]["decided"] if d[0] > stop]
    assert average_freeze_ratio(resumed) == pytest.approx(average_freeze_ratio(undisturbed))
    if METHODS[method].plans:
        assert all(seen["plan"] == undisturbed[0]["plan"] for seen in resumed)
        assert sum(undisturbed[0]["plan"].values()) > 0


def average_freeze_ratio(ranks):
    frozen, elements = (sum(seen["frozen_elements"][i] for seen in ranks) for i in (0, 1))
    return frozen / elements


@pytest.mark.parametrize("leg", LEGS, indirect=True)
def test_it_comes_to_the_same_weights(leg):
    _, _, resumed, undisturbed = leg
    assert_near(merged(resumed, "weights"), merged(undisturbed, "weights"))


@pytest.mark.parametrize("leg", LEGS, indirect=True)
def test_tokens_are_counted_over_all_replicas(leg):
    _, _, resumed, undisturbed = leg
    counted = sum(seen["n_tokens"] for seen in replicas_of(resumed))
    assert counted == undisturbed[0]["n_tokens"]
