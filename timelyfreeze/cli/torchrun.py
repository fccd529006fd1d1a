"""torchrun without a stack trace of its own beside a message.

Messages tell of user errors, and of nodes without a meeting. Before any process starts, the values
of the configuration are checked, and a model named by its id on the hub is fetched. On one node, a
run may go on with another number of processes, once all have ended.
"""

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

from timelyfreeze.cli import overlay
from timelyfreeze.cli.hub import with_fetched_model
from timelyfreeze.cli.train import WORKER
from timelyfreeze.files import write_whole
from timelyfreeze.planning import heeded_signals

USER_ERROR = 2
# What torchrun takes where --rdzv_conf has no "timeout" and there is no --master_port.
_MEET_WITHIN_S = "900"
_PORT = 29500
# Of torch: logs which process has failed.
_STARTS = "torch.distributed.elastic.multiprocessing.api"
_AGENT = "torch.distributed.elastic.agent.server.api"
_HEEDED = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # of torchrun; it would heed ignored ones too
_PROCESSES = "--nproc_per_node="
# Names the file in which a part says how the run goes on; set where somebody will read it.
NEXT = "TIMELYFREEZE_NEXT_PART"
# What the part before has said.
PRESENT = "TIMELYFREEZE_PART"


@dataclass(frozen=True)
class Restart:
    """How a run goes on."""

    split: Sequence[int]  # layers of each process, which has one stage of the pipeline
    first_split: Sequence[int]  # likewise of the run's first part
    n_former: int  # processes of the part before
    left_at: float  # when these began to leave, in seconds since the epoch

    def leave(self) -> None:
        """Write the restart for the launcher; a single process of the former part does."""
        write_whole(Path(os.environ[NEXT]), json.dumps(asdict(self)).encode())


def present_restart() -> Restart | None:
    """Return the restart of this part; None in the first part of a run."""
    text = os.environ.get(PRESENT)
    return None if text is None else Restart(**json.loads(text))


def main() -> None:
    """Run torchrun with the arguments of this process."""
    sys.argv[0] = "timelyfreeze train"  # which the parser of the configuration names
    try:
        _check_values(sys.argv[1:])
        sys.argv = with_fetched_model(sys.argv)
    except ValueError as error:
        print(f"error: {error}", flush=True)
        sys.exit(USER_ERROR)
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main as torchrun

    logging.getLogger(_STARTS).addFilter(_is_news)
    logging.getLogger(_AGENT).addFilter(lambda record: "death signal" not in record.getMessage())
    os.environ.setdefault(_HEEDED, ",".join(each.name for each in heeded_signals()))
    node = _node(sys.argv[1:])
    if node is not None:
        print(f"{node[0]} waits for the others at {node[1]}", flush=True)
    try:
        if node is None:
            _run_parts(torchrun)
        else:
            torchrun()
    except SignalException as stop:
        name = signal.Signals(stop.sigval).name
        print(f"Stopped by {name}", file=sys.stderr, flush=True)
        sys.exit(128 + stop.sigval)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode != USER_ERROR:
            raise
        sys.exit(USER_ERROR)
    except (DistError, RendezvousError) as error:
        if node is None:
            raise
        why = str(error).splitlines()[0]
        print(
            f"error: {node[0]} did not meet the others, or lost them, at {node[1]}: {why}; start "
            "all nodes with the same address and port, which nothing else may use, and another "
            "node_rank each (`timelyfreeze doctor` with the same options looks at that)",
            file=sys.stderr,
        )
        sys.exit(1)


def _check_values(arguments: Sequence[str]) -> None:
    """Raise a ValueError with errors of a run's configuration, without a model.

    A second in a single process; ranks would all import models and kernels first.
    """
    if WORKER not in arguments:
        return
    at = arguments.index(WORKER) + 1
    options = _options(arguments)
    # Of a cluster's own it may count nodes; ranks get theirs from torchrun.
    os.environ["WORLD_SIZE"] = str(options.nproc_per_node) if _is_one_node(options) else ""
    overlay.install()
    with overlay.without_release():
        import_module("torchtitan.freezing.values.errors").check(arguments[at:])
    del os.environ["WORLD_SIZE"]


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a line of torchrun's tells more than the error of the user's did."""
    status = record.args[0] if isinstance(record.args, tuple) and record.args else None
    is_known = record.levelno == logging.ERROR and status == USER_ERROR
    return not (is_known or record.getMessage().startswith("Sending process "))


def _run_parts(torchrun: Callable[[], None]) -> None:
    """Run torchrun, and again for every further part of a run."""
    os.environ.pop(PRESENT, None)
    with tempfile.TemporaryDirectory(prefix="timelyfreeze_") as folder:
        said = Path(folder) / "next_part.json"
        os.environ[NEXT] = str(said)
        while True:
            torchrun()
            if not said.exists():
                return
            os.environ[PRESENT] = text = said.read_text()
            said.unlink()
            n_processes = f"{_PROCESSES}{len(json.loads(text)['split'])}"
            sys.argv = [n_processes if w.startswith(_PROCESSES) else w for w in sys.argv]


def _node(arguments: Sequence[str]) -> tuple[str, str] | None:
    """Return node and meeting place in words; None for a single node."""
    options = _options(arguments)
    if _is_one_node(options):
        return None
    place = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port or _PORT}"
    conf = dict(part.partition("=")[::2] for part in options.rdzv_conf.split(",") if part)
    waits_s = conf.get("timeout", conf.get("join_timeout"))
    if waits_s is None and options.rdzv_backend == "static":
        waits_s = _MEET_WITHIN_S
    limit = f", {waits_s} s at most" if waits_s else ""
    number = f"Node {options.node_rank}" if options.rdzv_backend == "static" else "This node"
    return f"{number} of {options.nnodes}", f"{place}{limit}"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    return parser.parse_args(list(arguments))


def _is_one_node(options: argparse.Namespace) -> bool:
    return str(options.nnodes) in ("1", "1:1")


if __name__ == "__main__":
    main()
