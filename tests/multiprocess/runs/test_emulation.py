"""A pipeline emulated in one process equals, bit for bit, one with a process for each rank.

Durations are the one input that cannot repeat, so the recorder's times are replaced by fixed ones.
Gradients are clipped, so a norm that differs in its last bit would show in all weights.
"""

import json
from pathlib import Path

import pytest
import torch
from launcher import SCHEDULES, arguments, asked_for, merged, run_scenarios
from methods import ROWS, STEPS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_launch import launch

from timelyfreeze.records.summary import summary_from_json
from timelyfreeze.records.timeline_file import timeline_file, timeline_from_json
from timelyfreeze.schedule.order import order_from_csv, order_to_csv, parse_order
from timelyfreeze.settings.phases import Phase

pytestmark = pytest.mark.long  # continuous integration runs it

ROW = {row.method: row for row in ROWS}
# No freezing, a plan, and a policy that freezes the front: its stages skip their backwards whole.
METHODS = ["none", "timelyfreeze", "autofreeze"]
# Stops after which a run goes on in the other form.
PLACES = {"upper bound": 3, "lower bound": 5, "ramp": 8, "stable": 11}
RESUMED = ["timelyfreeze", "timelyfreeze+apf", "autofreeze"]
COMMON = {"model__flavor": "tiny", "training__steps": STEPS, "training__max_norm": 0.5}
EMULATED = {"emulation__enable": None}
# One with a full and one with a split backward, packed rows, and rows to validate on.
VALIDATION = {
    "validation__enable": None,
    "validation__dataset": "alpaca",
    "validation__dataset_path": "tests/assets/tiny_instruct",
    "validation__local_batch_size": 8,
    "validation__seq_len": 48,
    "validation__freq": 4,
    "data__validation_fraction": 16 / 1210,
    "training__seq_len": 64,
    "data__packing": None,
}
SAVED = {
    "checkpoint__enable": None,
    "checkpoint__keep_latest_k": 0,
    "checkpoint__no_last_save_model_only": None,
}


def method_arguments(method):
    return {"freezing__method": "none"} if method == "none" else ROW[method].arguments


def scenario(name, settings, *, method="timelyfreeze", emulated=False, **more):
    settings = {**COMMON, **method_arguments(method), **settings, **(EMULATED if emulated else {})}
    return {
        "name": name,
        "fake_clock": method != "none",
        "module": ROW[method].module if method in ROW else None,
        "args": arguments(**settings),
        **more,
    }


def ahead_of_1f1b(n_stages=4, n_microbatches=8):
    """1F1B with one forward more in front, a schedule that torch does not have."""
    rows = []
    for stage in range(n_stages):
        ahead = n_stages - stage + 1
        row = [f"{stage}F{m}" for m in range(ahead)]
        for m in range(n_microbatches):
            row.append(f"{stage}B{m}")
            if m + ahead < n_microbatches:
                row.append(f"{stage}F{m + ahead}")
        rows.append(" ".join(row))
    return parse_order(rows)


def compared(n_ranks, folder):
    """{name: (settings, what else a scenario has)} of runs that both forms make."""
    runs = {}
    for schedule in SCHEDULES:
        for method in METHODS if n_ranks == 4 else ["timelyfreeze", "none"]:
            settings = {
                "parallelism__pipeline_parallel_degree": n_ranks,
                "parallelism__pipeline_parallel_schedule": schedule,
            }
            runs[f"{n_ranks} {method} {schedule}"] = (settings, {"method": method})
    if n_ranks == 4:
        csv = {
            "parallelism__pipeline_parallel_schedule": "PipelineScheduleSingle",
            "parallelism__pipeline_parallel_schedule_csv": str(folder / "ahead.csv"),
        }
        runs["csv"] = (csv, {})
        zbv = {"parallelism__pipeline_parallel_schedule": "ZBVZeroBubble"}
        runs["both"] = (zbv, {"method": "timelyfreeze+apf"})
        runs["keep chain"] = ({"freezing__first_stage": "per_tensor"}, {})
        runs["two batches"] = ({"training__global_batch_size": 16}, {})
    else:
        for schedule in ("1F1B", "ZBVZeroBubble"):
            settings = {
                **VALIDATION,
                "parallelism__pipeline_parallel_degree": 2,
                "parallelism__pipeline_parallel_schedule": schedule,
            }
            runs[f"validation {schedule}"] = (settings, {})
            seeded = {**settings, "debug__seed": 123, "training__mixed_precision_param": "bfloat16"}
            runs[f"seeded {schedule}"] = (seeded, {"fixed_weights": False})
    return runs


def resumed_settings(method, saved=None):
    settings = {
        **SAVED,
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_schedule": "ZBVZeroBubble",
        "training__global_batch_size": 16,
    }
    if saved is not None:
        settings |= {
            "checkpoint__initial_load_path": saved,
            "checkpoint__no_initial_load_model_only": None,
            "checkpoint__load_only": None,
        }
    return settings


def saves(method, **more):
    return scenario(
        f"saves {method}", resumed_settings(method), method=method,
        save_at=list(PLACES.values()), **more,
    )  # fmt: skip


def resumes(method, place, folder, **more):
    saved = folder / f"saves {method}" / "checkpoint" / f"step-{PLACES[place]}"
    return scenario(
        f"{method} from {place}", resumed_settings(method, saved), method=method,
        fixed_weights=False, save_at=[], **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulation")
    (folder / "ahead.csv").write_text(order_to_csv(ahead_of_1f1b()))
    return folder


def asked_names(request, n_ranks):
    """Names of ``compared`` that a test will look at."""
    known = compared(n_ranks, Path())
    return [name for (name,) in asked_for(request, "name") if name in known]


def asked_places(request):
    """{method: places} of runs that go on in the other form."""
    asked = {}
    for method, place in asked_for(request, "method", "place"):
        asked.setdefault(method, []).append(place)
    return asked


@pytest.fixture(scope="module")
def real(request, folder):
    """Runs with a process for each rank."""
    seen = {}
    for n_ranks in (2, 4):
        runs = compared(n_ranks, folder)
        names = asked_names(request, n_ranks)
        scenarios = [scenario(name, runs[name][0], **runs[name][1]) for name in names]
        if n_ranks == 2:
            scenarios += [saves(method) for method in asked_places(request)]
        seen |= run_scenarios(folder / "real", n_ranks, scenarios, timeout_s=900)
    return seen


@pytest.fixture(scope="module")
def emulated(request, folder, real):
    """The same runs in one process, and runs that go on from checkpoints of the others."""
    scenarios = []
    for n_ranks in (2, 4):
        runs = compared(n_ranks, folder)
        scenarios += [
            scenario(name, runs[name][0], emulated=True, **runs[name][1])
            for name in asked_names(request, n_ranks)
        ]
    asked = asked_places(request)
    scenarios += [saves(method, emulated=True) for method in asked]
    scenarios += [
        resumes(method, place, folder / "real", emulated=True)
        for method, places in asked.items()
        for place in places
    ]
    return run_scenarios(folder / "emulated", 1, scenarios, timeout_s=1500)


@pytest.fixture(scope="module")
def resumed(request, folder, emulated):
    """Runs with a process for each rank that go on from checkpoints of emulated ones."""
    scenarios = [
        resumes(method, place, folder / "emulated")
        for method, places in asked_places(request).items()
        for place in places
    ]
    return run_scenarios(folder / "resumed", 2, scenarios, timeout_s=900)


def losses_of(ranks):
    (losses,) = [seen["losses"] for seen in ranks if seen["losses"][0] != -1.0]
    return losses


def by_stage(ranks, key, after=0):
    """Lists of (step, what happened) for each stage."""
    together = {}
    for seen in ranks:
        for step, stage, what in seen[key]:
            if step > after:
                together.setdefault(stage, []).append((step, what))
    return together


def assert_same(one, ranks, after=0):
    """Everything that a run computes is the same; ``after`` is the step of a stop."""
    (seen,) = one
    losses = losses_of(ranks)
    steps, batches = STEPS - after, min(len(seen["losses"]), len(losses))
    assert batches in (steps, 2 * steps)
    assert seen["losses"][-batches:] == losses[-batches:]
    assert seen["grad_norms"][-steps:] == ranks[0]["grad_norms"][-steps:]
    assert all(map(torch.equal, seen["batches"][-batches:], ranks[0]["batches"][-batches:]))
    assert by_stage(one, "masks", after) == by_stage(ranks, "masks", after)
    assert by_stage(one, "applied", after) == by_stage(ranks, "applied", after)
    assert [d for d in seen["decided"] if d[0] > after] == [
        d for d in ranks[0]["decided"] if d[0] > after
    ]
    assert seen.get("plan") == ranks[0].get("plan")
    for key in ("gradients", "weights"):
        left, right = seen[key], merged(ranks, key)
        assert left.keys() == right.keys()
        for name, tensor in right.items():
            same = left[name] is None if tensor is None else torch.equal(left[name], tensor)
            assert same, f"{key} of {name}"


def is_short(name):
    """All schedules on two ranks, and on four what those do not show."""
    alone = {"4 timelyfreeze Interleaved1F1B", "4 autofreeze ZBVZeroBubble"}
    return name.startswith("2 timelyfreeze") or name in alone | {
        "2 none 1F1B", "csv", "both", "validation ZBVZeroBubble", "seeded 1F1B",
    }  # fmt: skip


def names(*n_ranks, but=" of all "):
    return [
        pytest.param(name, marks=[] if is_short(name) else [pytest.mark.long])
        for n in n_ranks
        for name in compared(n, Path())
        if but not in f" {name} "
    ]


def places():
    return [
        pytest.param(
            method,
            place,
            marks=[] if method == "timelyfreeze+apf" or place == "ramp" else [pytest.mark.long],
        )
        for method in RESUMED
        for place in PLACES
    ]


@pytest.mark.parametrize("name", names(2, 4))
def test_an_emulated_run_equals_a_real_one(real, emulated, name):
    assert_same(emulated[name], real[name])


@pytest.mark.parametrize("name", names(4, but=" none "))
def test_the_runs_that_are_compared_freeze_and_clip(real, name):
    """Without this the test above could pass on runs that never froze or clipped anything."""
    masks = by_stage(real[name], "masks")
    stable = [m for rows in masks.values() for step, w in rows if step > 9 for m in w.values()]
    assert any(any(mask) for mask in stable)
    assert any(not all(mask) for mask in stable) or len(stable) < 4 * 8 * len(masks)
    norms = [norm for _, norm in real[name][0]["grad_norms"]]
    assert sum(norm > 0.5 for norm in norms) > STEPS // 2


@pytest.mark.parametrize("name", names(2, 4, but=" none "))
def test_every_ranks_actions_run_in_its_own_order(real, emulated, name):
    (seen,) = emulated[name]
    for rank in real[name]:
        held = {str(stage) for stage in rank["sizes"]}
        mine = [a for a in seen["executed"] if a.rstrip("0123456789")[:-1] in held]
        assert mine == rank["executed"]
    assert len(seen["executed"]) == sum(len(rank["executed"]) for rank in real[name])


def files_of(folder, name):
    (found,) = (folder / name / "tb").iterdir()
    return {
        path.name: path.read_text()
        for path in found.iterdir()
        if path.is_file() and path.suffix != ".0"
    }


@pytest.mark.parametrize("name", names(2, 4, but=" none "))
def test_the_files_are_those_of_the_pipeline(folder, real, emulated, name):
    ours, theirs = files_of(folder / "emulated", name), files_of(folder / "real", name)
    for file in ("schedule.csv", "bounds.json", "plan.json"):
        assert ours.get(file) == theirs.get(file), file
    assert order_from_csv(ours["schedule.csv"]).n_ranks == len(real[name])
    summary, of_real = (summary_from_json(f["summary.json"]) for f in (ours, theirs))
    assert of_real.emulated_ranks is None
    assert summary.emulated_ranks == len(real[name])
    assert (summary.n_devices, summary.ranks_per_replica) == (1, 1)
    assert summary.schedule == of_real.schedule
    assert summary.planned_gain == of_real.planned_gain
    assert summary.average_freeze_ratio == pytest.approx(of_real.average_freeze_ratio)
    assert summary.stage_ratios == of_real.stage_ratios
    assert summary.last_loss == of_real.last_loss
    assert summary.validation_loss == of_real.validation_loss
    assert summary.step_ms > summary.virtual_step_ms > 0
    assert summary.virtual_tokens_per_second > 0
    assert summary.real_batch_ms > 0


@pytest.mark.parametrize("name", [n for n in names(2, 4) if " none " in n.values[0]])
def test_a_run_without_freezing_is_timed_too(folder, emulated, name):
    summary = summary_from_json(files_of(folder / "emulated", name)["summary.json"])
    assert summary.emulated_ranks == int(name[0])
    assert summary.real_batch_ms > summary.batch_ms > 0
    assert summary.step_ms > summary.virtual_step_ms > summary.batch_ms


@pytest.mark.parametrize("name", [n for n in names(2) if n.values[0].startswith("validation")])
def test_the_validation_that_is_compared_took_place(folder, emulated, name):
    files = files_of(folder / "emulated", name)
    assert 0 < json.loads(files["summary.json"])["validation_loss"] < 10


@pytest.mark.parametrize(("method", "place"), places())
def test_a_real_run_goes_on_emulated(real, emulated, method, place):
    assert_same(emulated[f"{method} from {place}"], real[f"saves {method}"], PLACES[place])


@pytest.mark.parametrize(("method", "place"), places())
def test_an_emulated_run_goes_on_with_a_process_for_each_rank(emulated, resumed, method, place):
    assert_same(emulated[f"saves {method}"], resumed[f"{method} from {place}"], PLACES[place])


# -- the user's way in -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """A shortened default run with nothing but the flag: what it printed, and its folder."""
    folder = tmp_path_factory.mktemp("outputs")
    done = launch(
        "--emulation.enable",
        "--training.seq_len=32",
        "--training.steps=14",
        "--freezing.last_warmup_step=2",
        "--freezing.last_monitor_step=8",
        "--freezing.last_ramp_step=10",
        "--freezing.monitoring=halves",
        "--freezing.max_freeze_ratio=0.8",  # "auto" may freeze nothing on a busy machine
        "--metrics.log_freq=2",
        f"--job.dump_folder={folder}",
        n_processes=1,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (run_folder,) = (folder / "tb").iterdir()
    return done.stdout, run_folder


def test_the_default_run_needs_one_flag(default_run):
    output, folder = default_run
    assert "Emulating 4 ranks and 4 stages of 1F1B in this process: 64 actions a batch" in output
    for step in (1, 2, 14):
        assert output.count(f"step: {step:2}  ") == 1
    report = (folder / "report.txt").read_text()
    assert "emulated                 4 ranks in one process" in report
    lines = ("without freezing", "with freezing", "gain", "upper bound", "as run on one device")
    for line in lines:
        assert any(text.startswith(line) for text in report.splitlines()), line
    assert order_from_csv((folder / "schedule.csv").read_text()).n_ranks == 4


def test_its_timelines_show_the_ranks_on_the_virtual_clock(default_run):
    _, folder = default_run
    summary = summary_from_json((folder / "summary.json").read_text())
    for phase, batch_ms in (
        (Phase.UPPER_BOUND, summary.batch_ms_unfrozen),
        (Phase.STABLE, summary.batch_ms),
    ):
        timeline = timeline_from_json(timeline_file(folder, phase).read_text())
        assert timeline.n_ranks == 4
        assert timeline.batch_ms == pytest.approx(batch_ms, rel=0.3)
        assert all(before.end_ms <= after.start_ms + 1e-6 for before, after in joined(timeline))


def joined(timeline):
    """The blocks at both ends of each edge."""
    return [(timeline.blocks[i], timeline.blocks[j]) for i, j in timeline.edges]


def test_tensorboard_has_virtual_and_real_metrics(default_run):
    _, folder = default_run
    events = EventAccumulator(str(folder))
    events.Reload()
    real = [e.value for e in events.Scalars("freezing/emulation/real_batch_ms")]
    virtual = [e.value for e in events.Scalars("freezing/emulation/virtual_batch_ms")]
    assert len(real) == len(virtual) >= 6
    assert all(0 < v < r for v, r in zip(virtual, real, strict=True))
    tags = set(events.Tags()["scalars"])
    assert {
        "freezing/emulation/virtual_tokens_per_second",
        "freezing/emulation/virtual_step_ms",
        "throughput(tps)",
        "freezing/batch_ms/measured",
        "freezing/batch_ms/predicted",
        *(f"freezing/applied_ratio/stage_{s}" for s in range(4)),
    } <= tags


def test_a_prediction_is_compared_with_the_virtual_clock(default_run):
    _, folder = default_run
    summary = summary_from_json((folder / "summary.json").read_text())
    # What ran one action after the other takes longer than any batch that is predicted.
    assert summary.batch_ms < summary.real_batch_ms
    assert summary.batch_ms_unfrozen < summary.real_batch_ms_unfrozen
    assert summary.all_frozen_batch_ms <= summary.batch_ms_predicted
    assert summary.batch_ms_predicted <= summary.batch_ms_unfrozen_predicted


def test_several_processes_are_refused_before_any_process_group(tmp_path):
    done = launch("--emulation.enable", f"--job.dump_folder={tmp_path}", n_processes=2)
    assert done.returncode != 0
    assert done.stdout.count("2 processes were started; all ranks of the pipeline run in one") == 1
    assert "Traceback" not in done.stdout
    assert not list(tmp_path.iterdir())
