"""Runs of a pipeline of two ranks under every kind of parallelism, which several files share.

The ranks of a lone pipeline are emulated.
"""

import itertools
from dataclasses import dataclass, field

import pytest
from launcher import EMULATED, arguments, run_scenarios

N_MICROBATCHES = 4
FULL = ("1F1B", "Interleaved1F1B")
SPLIT = ("ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV")
# Modes of activation checkpointing; torch cannot split a backward through recomputed layers.
RECOMPUTE = {
    "none": {"activation_checkpoint__mode": "none"},
    "selective": {"activation_checkpoint__mode": "selective"},
    "selective op": {
        "activation_checkpoint__mode": "selective",
        "activation_checkpoint__selective_ac_option": "op",
    },
    "full": {"activation_checkpoint__mode": "full"},
}
PRECISIONS = {
    "fp32": {"training__mixed_precision_param": "float32"},
    "bf16": {"training__mixed_precision_param": "bfloat16"},
    # Products in float8 as a processor can imitate them, everything between them in fp32.
    "float8": {
        "training__mixed_precision_param": "float32",
        "model__converters": "quantize.linear.float8",
        "quantize__linear__float8__emulate": None,
    },
}
SETTINGS = {
    "model__flavor": "short",
    "parallelism__pipeline_parallel_degree": 2,
    # Long enough that no row is dropped, which would shift what each replica sees.
    "training__seq_len": 128,
    "data__no_shuffle": None,
    # Adam turns rounding of a near-zero gradient into a full step; with a large eps updates are
    # linear in gradients.
    "optimizer__lr": 1.0,
    "optimizer__eps": 10.0,
    "optimizer__weight_decay": 0.0,
    # Warm-up, both bounds and two steps of the ramp, which freezes 1/3 and then 2/3 of what the
    # plan does: a plan freezes most backwards whole, a ramp freezes tensors here and there.
    "training__steps": 5,
    "freezing__method": "timelyfreeze",
    "freezing__last_warmup_step": 1,
    "freezing__last_monitor_step": 3,
    "freezing__last_ramp_step": 6,
    "freezing__discard_batches": 0,
    "freezing__max_freeze_ratio": 0.8,
}


@dataclass(frozen=True)
class Kind:
    """A kind of parallelism.

    Attributes:
        n_replicas: Processes of a stage that see rows of their own.
        n_tp: Processes that share the tensors of a layer.
        n_rows: Rows of a microbatch in each replica.
        keys: Settings.
    """

    n_replicas: int = 1
    n_tp: int = 1
    n_rows: int = 1
    keys: dict = field(default_factory=dict)

    @property
    def n_processes(self):
        return 2 * self.n_replicas * self.n_tp

    @property
    def is_alone(self):
        return self.n_processes == 2

    @property
    def is_sharded(self):
        return self.n_replicas > 1


KINDS = {
    "alone": Kind(),
    "FSDP": Kind(n_replicas=2, keys={"data_parallel_shard_degree": 2}),
    "TP": Kind(n_tp=2, keys={"tensor_parallel_degree": 2}),
    "HSDP": Kind(
        n_replicas=4,
        keys={"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
    ),
    "FSDP and TP": Kind(
        n_replicas=2,
        n_tp=2,
        keys={"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    ),
    # What replicas with one row in each microbatch see together.
    "alone, 2 rows": Kind(n_rows=2),
    "alone, 4 rows": Kind(n_rows=4),
}


@dataclass(frozen=True)
class Case:
    """One run; ``precision`` and ``recompute`` are keys of the tables above.

    ``rank`` is that of the gradients of frozen weights, 0 for none.
    """

    kind_name: str
    schedule: str
    precision: str = "fp32"
    recompute: str = "none"
    is_long: bool = field(default=False, compare=False)
    rank: int = 0

    @property
    def kind(self):
        return KINDS[self.kind_name]

    @property
    def name(self):
        rank = (f"rank {self.rank}",) if self.rank else ()
        return ", ".join((self.kind_name, self.schedule, self.precision, self.recompute, *rank))

    @property
    def scenario(self):
        settings = {
            **SETTINGS,
            **{f"parallelism__{key}": value for key, value in self.kind.keys.items()},
            **PRECISIONS[self.precision],
            **RECOMPUTE[self.recompute],
            "training__local_batch_size": N_MICROBATCHES * self.kind.n_rows,
            "parallelism__pipeline_parallel_microbatch_size": self.kind.n_rows,
            "parallelism__pipeline_parallel_schedule": self.schedule,
            "freezing__gradient_rank": self.rank,
            **(EMULATED if self.kind.is_alone else {}),
        }
        return {
            "name": self.name,
            "fake_clock": True,
            "keep_weights": True,
            "args": arguments(**settings),
        }


def _every_day(kind_name):
    """Full and split backward, all precisions, and where cheap all modes of recomputation."""
    kind = KINDS[kind_name]
    is_large, is_alone = kind.n_processes == 8, kind.is_alone
    yield Case(kind_name, "ZBVZeroBubble", is_long=is_large)
    is_tp = kind_name == "TP"  # on processors its sums take longest
    yield Case(kind_name, "1F1B", "bf16", "selective", is_long=is_large or is_tp)
    if not is_large:
        yield Case(kind_name, "1F1B", is_long=True)
        yield Case(kind_name, "ZBVZeroBubble", precision="bf16", is_long=True)
        yield Case(kind_name, "Interleaved1F1B", recompute="full", is_long=not is_alone)
    yield Case(kind_name, "Interleaved1F1B", "float8", "selective", is_long=not is_alone)
    yield Case(kind_name, "ZBVZeroBubble", "float8", is_long=True)


def _all_cases():
    for kind_name, kind in KINDS.items():
        short = list(_every_day(kind_name))
        if kind.n_rows > 1:
            of_hsdp = kind.n_rows == 4
            short = [
                Case(kind_name, "1F1B", is_long=True),
                Case(kind_name, "ZBVZeroBubble", is_long=of_hsdp),
            ]
        yield from short
        everything = itertools.chain(
            itertools.product(FULL, ("fp32", "bf16"), RECOMPUTE),
            itertools.product(SPLIT, ("fp32", "bf16"), ("none",)),
        )
        for schedule, precision, recompute in everything if kind.n_rows == 1 else ():
            if Case(kind_name, schedule, precision, recompute) not in short:
                yield Case(kind_name, schedule, precision, recompute, is_long=True)


CASES = tuple(_all_cases())
RANK = 8
# Subspaces, whose gradients are compared with those of a pipeline alone.
LOW_RANK = (
    Case("FSDP", "ZBVZeroBubble", rank=RANK),
    Case("HSDP", "ZBVZeroBubble", rank=RANK, is_long=True),
)


def parametrized(cases):
    """Return ``cases`` as pytest's parameters, those of long runs marked."""
    marks = {False: (), True: (pytest.mark.long,)}
    return [pytest.param(case, id=case.name, marks=marks[case.is_long]) for case in cases]


class Runs:
    """Makes runs as they are asked for, all with as many processes in one start of torchrun.

    Args:
        chosen: All cases that will be asked for.
        folder_for: Returns a new folder for a name.
    """

    def __init__(self, chosen, folder_for):
        self._chosen = chosen
        self._folder_for = folder_for
        self._seen = {}

    def of(self, case):
        """Return what each rank of ``case`` saw."""
        n_processes = case.kind.n_processes
        if n_processes not in self._seen:
            alike = [c.scenario for c in self._chosen if c.kind.n_processes == n_processes]
            folder = self._folder_for(f"{n_processes}_processes")
            n_started = 1 if case.kind.is_alone else n_processes
            self._seen[n_processes] = run_scenarios(folder, n_started, alike, timeout_s=1700)
        return self._seen[n_processes][case.name]
