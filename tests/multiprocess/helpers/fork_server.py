"""Forks groups of processes that have torch and torchtitan imported, which else takes seconds each.

Usage: python tests/multiprocess/helpers/fork_server.py, as ``launcher.py`` starts it: once for all
tests of a session of pytest.

A line of standard input is a request, a JSON object {"environment", "output": file or FIFO for
what is printed, "errors": another for standard error, or null, "mark": file that stays open in all
of its processes, "timeout_s", and maybe "imports": modules that it imports before it forks} and
either {"torchrun": its arguments} or {"script", "arguments",
"n_processes", "alone": whether each is a group of its own}. The former is torchrun itself, but for
forking where it would start Python; the latter does without its rendezvous, which takes a second.
"torchruns" has the arguments of several, of which each has a process.
Either ends all processes when one fails.
A line of standard output answers with the exit status when they have ended: negative for a signal,
TIMED_OUT if they had to be ended.

The server itself runs nothing that starts threads or keeps state: what it forks is as good as a new
process.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback

import torch.distributed as dist
import torch.distributed.run as torchrun
import torch.multiprocessing as mp
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

# For the processes that are forked.
import torchtitan.freezing.elastic.packing
import torchtitan.freezing.launch
import torchtitan.freezing.spec
import torchtitan.freezing.trainer  # noqa: F401
from tests.torchtitan.helpers import quick_parser
from timelyfreeze.planning import end_with_parent
from torchtitan.freezing.launch import read_config
from torchtitan.freezing.report import reports

# What image classifiers and adapters are made of takes seconds, too.
with contextlib.suppress(ImportError):
    import peft  # noqa: F401
with contextlib.suppress(ImportError):
    from transformers.models.convnextv2 import modeling_convnextv2  # noqa: F401
    from transformers.models.vit import modeling_vit  # noqa: F401

TIMED_OUT = 124
_POLL_S = 0.02


def serve():
    """Answer requests until standard input ends."""
    end_with_parent(os.getppid(), signal.SIGKILL)
    quick_parser.remember_sources()
    for arguments in ([], ["--job.config_file=train_configs/tiny_8m.toml"]):
        read_config(arguments)
    for template in (("report.txt.j2", "\0"), ("report.md.j2", "not measured")):
        reports._template(*template)
    # What was imported stays: no collection needs to look at it, and to copy its pages.
    gc.freeze()
    for line in sys.stdin:
        print(_status_of(json.loads(line)), flush=True)


def _status_of(request):
    for name in request.get("imports", ()):
        importlib.import_module(name)
    server, leader = os.getpid(), os.fork()
    if leader == 0:
        end_with_parent(server, signal.SIGKILL)
        os._exit(_lead(request))
    deadline = time.monotonic() + request["timeout_s"]
    while time.monotonic() < deadline:
        ended, status = os.waitpid(leader, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    os.kill(leader, signal.SIGKILL)
    os.waitpid(leader, 0)
    return TIMED_OUT


def _lead(request):
    """Be torchrun, or what stands for it, and return the exit status."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT)
    errors = request["errors"]
    os.dup2(output, sys.stdout.fileno())
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT) if errors else output, sys.stderr.fileno())
    sys.stdout.reconfigure(line_buffering=True)
    os.open(request["mark"], os.O_RDONLY)
    os.environ.clear()
    os.environ.update(request["environment"])
    try:
        if "torchruns" in request:
            _be_torchruns(request["torchruns"])
        else:
            _be_torchrun(request["torchrun"]) if "torchrun" in request else _run_group(request)
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class _Forked(mp.get_context("fork").Process):
    """Python in a process of its own, with the methods of ``subprocess.Popen`` torchrun uses."""

    def __init__(self, words, environment):
        """Start it; ``words`` are Python, -u, a script or -m and a module, and the arguments."""
        super().__init__(target=_be_python, args=(words[2:], environment))
        self.start()

    def poll(self):
        return self.exitcode

    def wait(self, timeout=None):
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout)


def _be_python(words, environment):
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


def _be_torchrun(arguments):
    SubprocessHandler._popen = lambda self, words, environment: _Forked(words, environment)
    torchrun.main(arguments)


def _be_torchruns(launchers):
    context = mp.get_context("fork")
    processes = [context.Process(target=_be_torchrun, args=(words,)) for words in launchers]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in processes))


def _run_group(request):
    """Fork the processes of a group and be their store until all have ended."""
    # Bound before there are processes, served after: a store has threads, which fork badly.
    listener = socket.create_server(("localhost", 0))
    port = listener.getsockname()[1]
    group = mp.start_processes(
        _be_rank,
        args=(request, os.getpid(), port),
        nprocs=request["n_processes"],
        join=False,
        start_method="fork",
    )
    store = dist.TCPStore(
        "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    have_all_ended = False
    while not have_all_ended:
        have_all_ended = group.join()
    del store  # it serves for as long as it is held


def _be_rank(rank, request, leader, port):
    end_with_parent(leader, signal.SIGKILL)
    size = str(request["n_processes"])
    if request["alone"]:
        rank, size = 0, "1"
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    sys.argv = [request["script"], *request["arguments"]]
    runpy.run_path(request["script"], run_name="__main__")


if __name__ == "__main__":
    serve()
