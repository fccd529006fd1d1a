"""Runs scenarios in real processes for the tests of this folder."""

import functools
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
import torch.distributed as dist

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[2]

SCHEDULES = [
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]

MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
# A model small enough that eight stages of it train in a second.
SMALL = {
    "job.config_file": "train_configs/tiny_8m.toml",
    "model.flavor": "tiny",
    "training.seq_len": 32,
    "training.local_batch_size": 8,
    MICROBATCH: 2,
    # Upstream's defaults, which fit every number of stages.
    "parallelism.pipeline_parallel_first_stage_less_layers": 1,
    "parallelism.pipeline_parallel_last_stage_less_layers": 1,
    "training.steps": 1,
    "training.max_norm": 1e9,
    "metrics.log_freq": 1,
    "metrics.no_enable_tensorboard": None,
    "plots.no_enable": None,
    "freezing.method": "none",
    "freezing.control_every": 20,
    # What "auto" chooses, or whether it switches off, depends on how busy the machine is.
    "freezing.max_freeze_ratio": 0.8,
    "freezing.monitoring": "halves",
    "lr_scheduler.warmup_steps": 1,
    "parallelism.no_pipeline_parallel_expert_parallel_overlap": None,
}

# All ranks of the pipeline in one process, which ``test_emulation.py`` compares with real ones.
EMULATED = {"emulation__enable": None}

# All phases within a few steps of the model that the default run trains.
FREEZING = {
    "model__flavor": "8M",
    "freezing__method": "timelyfreeze",
    "freezing__last_warmup_step": 2,
    "freezing__last_monitor_step": 8,
    "freezing__last_ramp_step": 10,
    "freezing__discard_batches": 1,
    "training__steps": 14,
}


def arguments(**settings):
    """Return arguments; ``section__key=value`` sets ``section.key`` on top of the small run."""
    given = {key.replace("__", "."): value for key, value in settings.items()}
    merged = {**SMALL, **given}
    if merged.get("parallelism.pipeline_parallel_schedule") == "DualPipeV":
        # It needs a microbatch for each stage.
        merged |= {MICROBATCH: 1, **given}
    made = []
    for key, value in merged.items():
        several = map(str, value) if isinstance(value, list) else ()
        made += [f"--{key}", *several] if value is None or several else [f"--{key}={value}"]
    return made


def run_scenarios(
    folder, n_processes, scenarios, *, timeout_s=300, script="run_scenarios.py", imports=()
):
    """Run ``scenarios`` in ``n_processes`` of ``script``; return {name: [what each rank saw]}.

    Those of one process, emulated pipelines mostly, run side by side, one on each core. A scenario
    begins when the one that its "after" names has ended. Modules that take long to import, and are
    not imported by every run, are named by ``imports``: all processes then share them.
    """
    if not scenarios:
        return {}
    if n_processes == 1:  # so that no process waits while there is something else to do
        scenarios = sorted(scenarios, key=lambda scenario: "after" in scenario)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scenarios.json").write_text(json.dumps(scenarios))
    log = folder / "log.txt"
    request = {
        "script": str(HELPERS / script),
        "arguments": [str(folder / "scenarios.json"), str(folder)],
        "n_processes": n_processes,
        "imports": imports,
        "alone": n_processes == 1,
    }
    if n_processes == 1:
        request["n_processes"] = min(len(os.sched_getaffinity(0)), len(scenarios))
    server = ask_fork_server(request, log, folder / "scenarios.json", timeout_s)
    status = server.stdout.readline().strip()
    if status != "0":
        said = log.read_text(errors="replace")
        raise AssertionError(f"{script} ended with status {status}:\n{said[-9000:]}")
    return {
        scenario["name"]: [
            torch.load(folder / scenario["name"] / f"rank_{rank}.pt", weights_only=True)
            for rank in range(n_processes)
        ]
        for scenario in scenarios
    }


def ask_fork_server(request, output, mark, timeout_s):
    """Ask for processes, see ``fork_server.py``, and return the server, which prints their status.

    Args:
        request: What is to be run.
        output: File or FIFO for what it prints.
        mark: File that stays open in all of its processes.
        timeout_s: After so many seconds they are ended.
    """
    server = _fork_server()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    files = {"output": str(output), "errors": None, "mark": str(mark)}
    request = {"environment": environment, "timeout_s": timeout_s, **files, **request}
    print(json.dumps(request), file=server.stdin, flush=True)
    return server


def forked_torchrun(*arguments, timeout_s=200):
    """Run torchrun in forked processes and return (exit status, standard output and error)."""
    return _forked({"torchrun": [str(word) for word in arguments]}, timeout_s)


def forked_torchruns(*launchers, timeout_s=200):
    """Run several beside each other, as hosts do, of which each has a list of arguments."""
    return _forked({"torchruns": launchers}, timeout_s)


def _forked(request, timeout_s):
    with TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output.txt", Path(folder) / "errors.txt"
        output.touch()
        request |= {"errors": str(errors)}
        server = ask_fork_server(request, output, output, timeout_s)
        status = int(server.stdout.readline())
        return status, output.read_text(), errors.read_text()


def words(*args, n_processes, config="train_configs/tiny_8m.toml"):
    return [
        f"--nproc_per_node={n_processes}", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0",
        "-m", "torchtitan.freezing", f"--job.config_file={config}", *args,
    ]  # fmt: skip


def launch(*args, timeout_s=200, **given):
    """Start torchrun as users do."""
    command = [sys.executable, "-m", "torch.distributed.run", *words(*args, **given)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s
    )


def launch_forked(*args, **given):
    """Run torchrun in processes that need to import little."""
    arguments = words(*args, **given)
    return subprocess.CompletedProcess(arguments, *forked_torchrun(*arguments))


@functools.cache
def _fork_server():
    """Return the process that ``run_scenarios`` asks; it ends with this one."""
    return subprocess.Popen(
        [sys.executable, str(HELPERS / "fork_server.py")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_each_scenario(run):
    """Be one of the processes that ``run_scenarios`` starts.

    Args:
        run: Called with each scenario of the file that the command line names and a folder for it.
    """
    from torchtitan.tools.logging import init_logger

    init_logger()
    # What was imported lives as long as the process; collections need not look at it.
    gc.freeze()
    for scenario in json.loads(Path(sys.argv[1]).read_text()):
        folder = Path(sys.argv[2]) / scenario["name"]
        folder.mkdir(parents=True, exist_ok=True)
        if int(os.environ["WORLD_SIZE"]) == 1 and not is_mine(scenario, folder):
            continue
        join_group(scenario["name"])
        run(scenario, folder)
        dist.barrier()
        # Each trainer makes groups, with threads that would slow down all that follow.
        dist.destroy_process_group()
        # Upstream's trainer turns the collector's full runs off, and a trainer is full of cycles.
        gc.collect()


def spare_last_pause(titan_train):
    """Spare a run the 2 s that upstream's module waits at its end.

    The module gets a clock of its own: who waits for a solver would spin if nobody could sleep.
    """
    titan_train.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})


def is_mine(scenario, folder):
    """Whether no other process took the scenario; return once the one before it has ended."""
    try:
        (folder / "taken").touch(exist_ok=False)
    except FileExistsError:
        return False
    # Scenarios are taken in order, so that some process is at work on the one before.
    while "after" in scenario and not (folder.parent / scenario["after"] / "rank_0.pt").exists():
        time.sleep(0.05)
    return True


def join_group(name):
    """Make the group of all processes under a name of its own.

    Upstream takes a group that is there. One it made itself, after another was given up, would find
    that one's addresses in torchrun's store.
    """
    port, size = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    if size == 1:
        store = dist.HashStore()
    else:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port, size, is_master=False)
        store = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=size)


def asked_for(request, *parameters):
    """Return the values of ``parameters`` in the tests of a file that will run, without repeats.

    For fixtures that make the runs of many tests in one start: they need not make those of tests
    that are not chosen.

    Args:
        request: Pytest's, of the fixture.
        parameters: Names; only tests that have all of them count.
    """
    chosen = []
    for item in request.session.items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and all(name in given for name in parameters):
            values = tuple(given[name] for name in parameters)
            if values not in chosen:
                chosen.append(values)
    return chosen


def merged(ranks, key):
    """Merge what every rank saw under ``key``, a dict by parameter name."""
    together = {}
    for seen in ranks:
        together.update(seen[key])
    return together


def assert_same(runs, others):
    """Assert that two runs have read the same rows and learned the same, to the last bit."""
    for a, b in zip(runs, others, strict=True):
        assert len(a["batches"]) == len(b["batches"])
        assert all(map(torch.equal, a["batches"], b["batches"]))
        assert a["losses"] == b["losses"]
        assert a["grad_norms"] == b["grad_norms"]
    before, after = merged(runs, "weights"), merged(others, "weights")
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def assert_goes_on(whole, resumed, stopped_at):
    """Assert that a run resumed after a step equals, to the last bit, one that never stopped."""
    for a, b in zip(whole, resumed, strict=True):
        n_steps = len(a["grad_norms"])
        batches_left = len(a["losses"]) // n_steps * (n_steps - stopped_at)
        assert b["losses"] == a["losses"][-batches_left:]
        assert b["grad_norms"] == a["grad_norms"][-(n_steps - stopped_at) :]
        for rows in ("batches", "labels"):
            assert all(map(torch.equal, b[rows], a[rows][-batches_left:]))
        assert b["masks"] == [m for m in a["masks"] if m[0] > stopped_at]
        assert b["decided"] == [d for d in a["decided"] if d[0] > stopped_at]
        assert b.get("plan") == a.get("plan")
        assert b["average_freeze_ratio"] == a["average_freeze_ratio"]
    left, right = merged(resumed, "weights"), merged(whole, "weights")
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def assert_near(tensors, others):
    """Assert that tensors by name are the same but for rounding."""
    assert tensors.keys() == others.keys()
    for name in tensors:
        difference = float((tensors[name] - others[name]).abs().max())
        assert difference < 1e-5, f"{name}: {difference:.2e}"
