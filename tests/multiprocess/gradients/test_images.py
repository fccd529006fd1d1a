"""Image classifiers in a pipeline: gradients with and without masks, and all freezing methods.

One schedule of each kind of model runs on real ranks, the others emulated.
"""

import itertools
import math

import pytest
from image_runs import KINDS, SCHEDULES, gradients_by_microbatch, image_scenario, loss_of
from launcher import EMULATED, asked_for, merged, run_scenarios
from methods import PHASES, ROW, ROWS, STEPS
from one_process import masked_sum
from test_methods import frozen_by_step

pytest.importorskip("transformers")
pytest.importorskip("torchvision")

N_MICROBATCHES = 4
NO_GRADIENT = "k_proj.bias"
PLANNED = {
    "freezing__method": "timelyfreeze",
    **PHASES,
    "training__steps": STEPS,
    "parallelism__pipeline_parallel_microbatch_size": 2,
}
REAL = {"vit": "1F1B", "convnextv2": "ZBVZeroBubble"}
EMULATED_TOO = "Interleaved1F1B"
# Besides full labels without freezing: shares of classes, smoothed.
LABELS = {"classes": {}, "shares": {"vision__mixup": 0.5, "vision__label_smoothing": 0.2}}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    one = {"parallelism__pipeline_parallel_degree": 1}
    scenarios = [
        image_scenario(f"{kind} {labels}", kind, **one, **LABELS[labels])
        for kind in KINDS
        for labels in LABELS
    ]
    return run_scenarios(tmp_path_factory.mktemp("single"), 1, scenarios)


def is_real(kind, schedule, what):
    return REAL[kind] == schedule and what == "classes"


def of_run(kind, schedule, what):
    settings = {"parallelism__pipeline_parallel_schedule": schedule}
    if not is_real(kind, schedule, what):
        settings |= EMULATED
    name, more = f"{kind} {schedule} {what}", None
    if what in LABELS:
        settings |= LABELS[what]
    elif what in ("nothing", "none"):
        settings |= {**PLANNED, "training__steps": PHASES["freezing__last_monitor_step"] + 1}
        settings |= {"freezing__method": "none"} if what == "none" else {}
    else:
        settings |= PLANNED
        more = {"fake_clock": True, "keep_weights": True}
    return image_scenario(name, kind, more=more, **settings)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    asked = dict.fromkeys(asked_for(request, "kind", "schedule", "what"))
    masked = [(*pair, "masks") for pair in asked_for(request, "kind", "masked")]
    none = [(*one[:2], "none") for one in asked if one[2] == "nothing"]
    folder, wanted = tmp_path_factory.mktemp("images"), dict.fromkeys([*asked, *masked, *none])
    real = [of_run(*one) for one in wanted if is_real(*one)]
    emulated = [of_run(*one) for one in wanted if not is_real(*one)]
    seen = run_scenarios(folder, 4, real)
    return seen | run_scenarios(folder, 1, emulated, timeout_s=900)


def tolerance(expected, scale):
    """Return the rounding of a gradient: in proportion to itself, and to the terms that it is of.

    Those of queries are small differences of large terms; a bias of keys moves all scores of a row
    alike, so that its gradient is rounding alone.
    """
    return 1e-5 * float(expected.norm()) + 1e-7 * scale


def assert_near(gradient, expected, name, scale):
    difference = float((gradient - expected).norm())
    assert difference < tolerance(expected, scale), f"{name}: {difference:.1e}"


def gradient_cases():
    """All labels on the schedule that is real, full ones on another, which is emulated."""
    return [
        pytest.param(kind, schedule, what, marks=[] if is_short else [pytest.mark.long])
        for kind in KINDS
        for schedule in SCHEDULES
        for what in LABELS
        for is_short in [schedule == REAL[kind] or (schedule, what) == (EMULATED_TOO, "classes")]
    ]


@pytest.mark.parametrize(("kind", "schedule", "what"), gradient_cases())
def test_gradients_equal_those_of_one_process(single, runs, kind, schedule, what):
    (reference,), ranks = single[f"{kind} {what}"], runs[f"{kind} {schedule} {what}"]
    gradients = merged(ranks, "gradients")
    assert gradients.keys() == reference["gradients"].keys()
    (_, norm), *_ = reference["grad_norms"]
    for name, expected in reference["gradients"].items():
        assert_near(gradients[name], expected, name, norm)
    assert loss_of(ranks) == pytest.approx(reference["losses"], rel=1e-6)
    assert {seen["n_tokens"] for seen in ranks} == {8}, "pictures, whatever their labels"
    for seen in ranks:
        assert seen["grad_norms"] == [(1, pytest.approx(norm, rel=1e-5))]


MASKED = [
    pytest.param(kind, schedule, marks=[] if REAL[kind] == schedule else [pytest.mark.long])
    for kind in KINDS
    for schedule in SCHEDULES
]


@pytest.mark.parametrize(("kind", "masked"), MASKED)
def test_masked_gradients_equal_those_of_one_process(runs, kind, masked):
    """Convolutions, biases, norms and GRN, in full and in split backwards."""
    ranks = runs[f"{kind} {masked} masks"]
    frozen = frozen_in_last_step(ranks)
    full = gradients_by_microbatch(
        kind, merged(ranks, "weights_before"), ranks[0]["batches"][-1], ranks[0]["labels"][-1],
        N_MICROBATCHES,
    )  # fmt: skip
    gradients = merged(ranks, "gradients")
    assert gradients.keys() == frozen.keys() == full.keys()
    scale = max(float(each.sum(0).norm()) for each in full.values())
    for name, gradient in gradients.items():
        expected = masked_sum(full[name], frozen[name])
        assert (gradient is None) == (expected is None), name
        if gradient is not None:
            assert_near(gradient, expected, name, scale)
            assert_one_mask_would_show(full[name], expected, name, scale)
    partly = [name for name, mask in frozen.items() if 0 < sum(mask) < N_MICROBATCHES]
    for role in ROLES[kind]:
        assert any(role in name for name in partly), f"no {role} was frozen in some microbatches"


ROLES = {
    "vit": ("attention.q_proj.weight", "mlp.fc1.bias", "layernorm_after.weight"),
    "convnextv2": ("dwconv.weight", "dwconv.bias", "layernorm.weight", "grn.weight", "grn.bias"),
}


def assert_one_mask_would_show(by_microbatch, expected, name, scale):
    """The gradient moves by far more than rounding with any one of its masks."""
    if not name.endswith(NO_GRADIENT):
        least = float(by_microbatch.flatten(1).norm(dim=1).min())
        assert least > 10 * tolerance(expected, scale), name


def frozen_in_last_step(ranks):
    """Return {name: whether it was frozen, by microbatch}."""
    frozen = {}
    for seen in ranks:
        for step, stage, masks in seen["masks"]:
            for place, name in enumerate(seen["names"][stage] if step == seen["step"] else ()):
                frozen[name] = [bool(m in masks and masks[m][place]) for m in range(N_MICROBATCHES)]
    return frozen


@pytest.mark.parametrize("what", ["nothing"])
@pytest.mark.parametrize(
    "schedule", [pytest.param("1F1B", marks=[pytest.mark.long]), "ZBVZeroBubble"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_masks_that_freeze_nothing_change_no_bit(runs, kind, schedule, what):
    """Up to the first step that freezes, whose loss is that of weights updated four times."""
    ours, none = (runs[f"{kind} {schedule} {which}"] for which in (what, "none"))
    assert 5 not in [step for seen in none for step, *_ in seen["masks"]]
    assert min(frozen_by_step(ours)) == 5
    assert loss_of(ours)[:5] == loss_of(none)[:5]
    assert len(set(loss_of(ours)[:5])) == 5
    for here, there in zip(ours, none, strict=True):
        assert here["grad_norms"][:4] == there["grad_norms"][:4]


def method_cases():
    short = {("vit", "timelyfreeze", "1F1B"), ("convnextv2", "autofreeze", "GPipe")}
    return [
        pytest.param(*case, marks=[] if case in short else [pytest.mark.long])
        for case in itertools.product(KINDS, ROW, SCHEDULES)
    ]


@pytest.fixture(scope="module")
def of_methods(request, tmp_path_factory):
    scenarios = [
        image_scenario(
            f"{kind} {method} {schedule}",
            kind,
            more={"fake_clock": True, "module": image_module(method)},
            parallelism__pipeline_parallel_schedule=schedule,
            training__steps=STEPS,
            **EMULATED,
            **ROW[method].arguments,
        )
        for kind, method, schedule in asked_for(request, "kind", "method", "schedule")
    ]
    return run_scenarios(tmp_path_factory.mktemp("methods"), 1, scenarios, timeout_s=1500)


def image_module(method):
    """Return the helper that registers the method, which brings the pictures too."""
    return "every_other_pictures" if ROW[method].module else "few_pictures"


@pytest.mark.parametrize(("kind", "method", "schedule"), method_cases())
def test_a_method_trains_through_all_its_phases(of_methods, kind, method, schedule):
    ranks = of_methods[f"{kind} {method} {schedule}"]
    losses = loss_of(ranks)
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    frozen = frozen_by_step(ranks)
    assert not frozen.keys() & {1, 2}, "warm-up freezes nothing"
    stable = [mask for step in range(10, STEPS + 1) for mask in frozen.get(step, {}).values()]
    assert any(any(mask) for mask in stable)
    gradients = merged(ranks, "gradients")
    assert any(gradient is not None for gradient in gradients.values()), "something is trained"
    if not ROW[method].plans:
        _, decided = ranks[0]["decided"][-1]
        assert all(seen["decided"] == ranks[0]["decided"] for seen in ranks)
        assert {name for name, g in gradients.items() if g is None} == set(decided)
    assert len(ROWS) == len(ROW)
