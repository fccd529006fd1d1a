"""Training with compiled blocks, in every phase, equals training with eager ones.

The eager run freezes whole blocks too (``whole_blocks``), so both have the same masks. A fake clock
gives both the same plan.
"""

import itertools

import pytest
from launcher import arguments, assert_goes_on, assert_near, merged, run_scenarios
from methods import ROWS, STEPS
from saving import SAVED, resumed_from
from test_hybrid import SETTINGS

pytestmark = pytest.mark.long  # continuous integration runs it

ROW_OF = {row.method: row for row in ROWS}
COMPILED = {"compile__enable": None, "compile__backend": "aot_eager"}
EAGER = {}
BF16 = {"training__mixed_precision_param": "bfloat16"}
PLANNED = {**ROW_OF["timelyfreeze"].arguments, "freezing__first_stage": "per_tensor"}
# Processes, and settings on top of the usual ones.
CASES = {
    "1F1B": (2, {**PLANNED, "parallelism__pipeline_parallel_schedule": "1F1B"}),
    "interleaved, skip_input_grads, recomputed": (
        2,
        {
            **PLANNED,
            "freezing__first_stage": "all_or_nothing",
            "freezing__max_freeze_ratio": 1.0,
            "parallelism__pipeline_parallel_schedule": "Interleaved1F1B",
            "activation_checkpoint__mode": "full",
        },
    ),
    "with a policy's choice": (
        2,
        {
            **ROW_OF["timelyfreeze+autofreeze"].arguments,
            "parallelism__pipeline_parallel_schedule": "GPipe",
        },
    ),
    "sharded": (
        4,
        {
            **PLANNED,
            "parallelism__pipeline_parallel_schedule": "1F1B",
            "parallelism__data_parallel_shard_degree": 2,
        },
    ),
    "in subspaces, bf16 by autocast": (
        2,
        {
            **PLANNED,
            **BF16,
            "freezing__gradient_rank": 8,
            "parallelism__pipeline_parallel_schedule": "Interleaved1F1B",
            "activation_checkpoint__mode": "full",
        },
    ),
    "in subspaces, bf16 by FSDP": (
        4,
        {
            **PLANNED,
            **BF16,
            "freezing__gradient_rank": 8,
            "parallelism__pipeline_parallel_schedule": "1F1B",
            "parallelism__data_parallel_shard_degree": 2,
        },
    ),
    "bf16 by autocast": (2, {**PLANNED, **BF16, "parallelism__pipeline_parallel_schedule": "1F1B"}),
    "bf16 by FSDP": (
        4,
        {
            **PLANNED,
            **BF16,
            "parallelism__pipeline_parallel_schedule": "1F1B",
            "parallelism__data_parallel_shard_degree": 2,
        },
    ),
}
# Stopped at the end of a step, in the lower bound and in the ramp, and gone on with in either form.
STOPS = (5, 8)
FORMS = {"compiled": COMPILED, "eager": EAGER}


@pytest.fixture(scope="module", params=[2, 4])
def runs(request, tmp_path_factory):
    """Of every case with so many processes, what the compiled and the eager run saw."""
    scenarios = [
        {
            "name": f"{case} {kind}".replace(" ", "_"),
            "module": "whole_blocks",
            "fake_clock": True,
            "fixed_weights": False,  # those go by names, and a compiled block's differ
            "args": arguments(**{**SETTINGS, **settings, **extra}),
        }
        for case, (n_processes, settings) in CASES.items()
        if n_processes == request.param
        for kind, extra in FORMS.items()
    ]
    folder = tmp_path_factory.mktemp(f"compiled_{request.param}")
    seen = run_scenarios(folder, request.param, scenarios, timeout_s=600)
    return {
        case: tuple(seen[f"{case} {kind}".replace(" ", "_")] for kind in ("compiled", "eager"))
        for case, (n_processes, _) in CASES.items()
        if n_processes == request.param
    }


def blocks_of(names, *, linear_alone):
    """Positions of the tensors of each transformer block, or of its linear weights."""
    blocks = {}
    for i, name in enumerate(names):
        if name.startswith("layers.") and not (linear_alone and "norm" in name):
            blocks.setdefault(name.split(".")[1], []).append(i)
    return list(blocks.values())


def without_wrappers(weights):
    return {
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): value
        for name, value in weights.items()
    }


def test_blocks_are_frozen_whole_and_alike(runs):
    for case, (compiled, eager) in runs.items():
        n_torn = n_frozen = n_live = 0
        for seen, other in zip(compiled, eager, strict=True):
            assert seen["masks"] == other["masks"], case
            for _, stage, masks in seen["masks"]:
                for mask in masks.values():
                    for block in blocks_of(seen["names"][stage], linear_alone="subspace" in case):
                        frozen = {mask[i] for i in block}
                        n_torn += len(frozen) > 1
                        n_frozen += frozen == {True}
                        n_live += frozen == {False}
        assert (n_torn, n_frozen > 0, n_live > 0) == (0, True, True), case


def test_weights_equal_those_of_the_eager_run(runs):
    for case, both in runs.items():
        compiled, eager = (without_wrappers(merged(ranks, "weights")) for ranks in both)
        assert compiled.keys() == eager.keys(), case
        for name in compiled:
            difference = float((compiled[name] - eager[name]).abs().max())
            assert difference < 1e-5, f"{case}, {name}: {difference:.2e}"


def test_where_the_plan_says_all_or_nothing_that_is_what_is_applied(runs):
    for case, (compiled, _) in runs.items():
        plan, last = compiled[0]["plan"], max(step for step, *_ in compiled[0]["applied"])
        pairs = [
            (plan[f"{stage}B{microbatch}"], fraction)
            for seen in compiled
            for step, stage, fractions in seen["applied"]
            if step == last
            for microbatch, fraction in fractions.items()
        ]
        assert any(ratio > 0.0 for ratio, _ in pairs), case
        assert all(fraction == ratio for ratio, fraction in pairs if ratio in (0.0, 1.0)), case


def resumable(form, **more):
    settings = {
        **SETTINGS,
        **ROW_OF["timelyfreeze+autofreeze"].arguments,
        "parallelism__pipeline_parallel_schedule": "1F1B",
        **SAVED,
    }
    return {
        "name": form,
        "module": "whole_blocks",
        "fake_clock": True,
        "fixed_weights": False,
        "save_at": [],
        "args": arguments(**{**settings, **FORMS[form], **more}),
    }


@pytest.fixture(scope="module")
def resumed_runs(tmp_path_factory):
    """Runs of both forms, and each form gone on with in both."""
    folder = tmp_path_factory.mktemp("compiled_resume")
    scenarios = [{**resumable(form), "save_at": STOPS} for form in FORMS]
    for begun, step, ended in itertools.product(FORMS, STOPS, FORMS):
        going_on = resumable(
            ended,
            **resumed_from(folder / begun / "checkpoint" / f"step-{step}"),
        )
        scenarios.append({**going_on, "name": f"{begun} to {step}, {ended}"})
    return run_scenarios(folder, 2, scenarios, timeout_s=900)


@pytest.mark.parametrize("step", STOPS)
@pytest.mark.parametrize("begun", FORMS)
def test_a_run_goes_on_in_its_form_to_the_last_bit(resumed_runs, begun, step):
    whole, resumed = resumed_runs[begun], resumed_runs[f"{begun} to {step}, {begun}"]
    assert_goes_on(whole, resumed, step)


@pytest.mark.parametrize("step", STOPS)
@pytest.mark.parametrize(("begun", "ended"), [("compiled", "eager"), ("eager", "compiled")])
def test_a_run_goes_on_in_the_other_form(resumed_runs, begun, ended, step):
    whole, resumed = resumed_runs[begun], resumed_runs[f"{begun} to {step}, {ended}"]
    assert len(resumed[0]["losses"]) == len(whole[0]["losses"]) * (STEPS - step) // STEPS
    for a, b in zip(whole, resumed, strict=True):
        assert b["masks"] == [m for m in a["masks"] if m[0] > step]
        assert b["decided"] == [d for d in a["decided"] if d[0] > step]
        assert b["plan"] == a["plan"]
    assert_near(*(without_wrappers(merged(ranks, "weights")) for ranks in (resumed, whole)))
