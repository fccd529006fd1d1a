"""Puts a controller together for a rank's stages, once its arguments are found right."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from timelyfreeze.control.controller import FreezeController
from timelyfreeze.control.parts import check_same_parts
from timelyfreeze.control.plans.planner import Planner, TransferMeter
from timelyfreeze.control.policy_runner import PolicyRunner
from timelyfreeze.control.state import FreezingState
from timelyfreeze.front.caching import ActivationStore, FrontCache, check_blocks
from timelyfreeze.planning import FreezePlan
from timelyfreeze.policies import (
    ComparesOutputs,
    FreezePolicy,
    ReferenceSettings,
    Source,
    build_layout,
)
from timelyfreeze.runtime import (
    ActionRecorder,
    Clock,
    Exchange,
    FreezingStage,
    OutsideClock,
    clock_for,
    measure_transfers,
)
from timelyfreeze.runtime.low_rank import Subspaces
from timelyfreeze.runtime.meters import ChangeMeter, GradientEnergy
from timelyfreeze.runtime.reference import Reference, make_reference
from timelyfreeze.runtime.reference.comparator import OutputComparator
from timelyfreeze.schedule import ScheduleOrder, build_dag
from timelyfreeze.settings import HOST, PER_TENSOR, FreezeSettings
from timelyfreeze.timing import DurationBounds, shared_cores, usable_cores

logger = logging.getLogger(__name__)


def attach_clocks(
    stages: Sequence[FreezingStage],
    recorder: ActionRecorder,
    settings: FreezeSettings | None = None,
) -> None:
    """Have stages, parallelisms applied, time actions, and accept masks if settings want any."""
    per_tensor = False
    rank = seed = 0
    if settings is not None and settings.phases.measures:
        rank, seed = max(settings.gradient_ranks), settings.seed
        per_tensor = settings.first_stage == PER_TENSOR and not rank
    for stage in stages:
        stage.attach(recorder, per_tensor=per_tensor, gradient_rank=rank, seed=seed)


def build_controller(
    stages: Sequence[FreezingStage],
    order: ScheduleOrder,
    settings: FreezeSettings,
    policy: FreezePolicy | None,
    recorder: ActionRecorder,
    *,
    device: torch.device,
    exchange: Exchange | None = None,
    n_processors: float | None = None,
    on_solved: Callable[[FreezePlan, DurationBounds], None] = lambda plan, bounds: None,
    transfers: TransferMeter | None = None,
    measures_energy: bool = False,
    outside: OutsideClock | None = None,
    optimizers: Sequence[Optimizer] = (),
    store: ActivationStore | None = None,
    front_identity: str = "",
    state: type[FreezingState] = FreezingState,
) -> FreezeController:
    """Return a controller; every rank must call this together.

    Without a policy tensors are drawn at random; without ``transfers`` links between ranks are
    timed by messages. A ``store`` keeps what a frozen front puts out, for a policy that decides
    alone; ``front_identity`` is what that depends on besides the front's weights and the tokens.
    """
    if any(stage.has_compiled_blocks for stage in stages):
        logger.info(
            "Blocks are compiled: each is frozen whole or not at all in a microbatch, other "
            "tensors one by one"
        )
    exchange = exchange or Exchange()
    checks = None
    if policy is not None:
        rate = partial(highest_learning_rate, optimizers) if optimizers else None
        checks = checks_for(
            stages, policy, settings, exchange, clock_for(device), learning_rate=rate
        )
    energy = None
    if measures_energy:
        parameters = {s.stage_index: [p for _, p in s.named_stage_parameters()] for s in stages}
        energy = GradientEnergy(parameters)
    planner = Planner(
        order,
        settings,
        settings.phases,
        exchange,
        n_processors=n_processors,
        on_solved=on_solved,
        measure_transfers=transfers or partial(measure_transfers, stages, order, exchange, device),
    )
    cache = None
    if store is not None and checks is not None:
        check_blocks(stages, checks.layout)
        held = [stage.stage_index for stage in stages]
        model = checks.layout, dict(checks.parameters), held, build_dag(order)
        cache = FrontCache(store, *model, exchange, front_identity, lambda: checks.decision.frozen)
    controller = FreezeController(
        stages,
        settings,
        recorder,
        exchange,
        planner,
        checks,
        energy=energy,
        outside=outside,
        cache=cache,
        subspaces=Subspaces(
            [stage.low_rank for stage in stages if stage.low_rank is not None],
            settings.seed,
            settings.gradient_ranks,
        ),
        state=state,
    )
    check_same_parts(controller.parts, exchange)
    return controller


def highest_learning_rate(optimizers: Sequence[Optimizer]) -> float:
    """Return the highest of all groups of parameters."""
    return max(float(group["lr"]) for each in optimizers for group in each.param_groups)


def checks_for(
    stages: Sequence[FreezingStage],
    policy: FreezePolicy,
    settings: FreezeSettings,
    exchange: Exchange,
    clock: Clock,
    *,
    learning_rate: Callable[[], float] | None = None,
    make_reference: Callable[[ReferenceSettings], Reference] = make_reference,
) -> PolicyRunner:
    """Set up a policy for a rank's stages, recorders attached; every rank must call this together.

    Everyone's names and sizes are exchanged once here; ``clock`` times the scoring. A policy that
    compares outputs does so by ``make_reference``, at the learning rate of the step to come.
    """
    named = {stage.stage_index: stage.named_stage_parameters() for stage in stages}
    mine = {s: [(name, p.numel()) for name, p in of_stage] for s, of_stage in named.items()}
    ranks = exchange.all_gather(mine)
    layout = build_layout({s: tensors for rank in ranks for s, tensors in rank.items()})
    parameters = [pair for of_stage in named.values() for pair in of_stage]
    meter = None
    if policy.measurement is not None:
        meter = ChangeMeter(
            parameters,
            policy.measurement,
            on_host=settings.score_memory == HOST,
            dtype=getattr(torch, settings.score_dtype),
        )
    watch = None
    if isinstance(policy, ComparesOutputs):
        wanted = policy.reference_settings
        # Of ranks that hold the same stage, the first evaluates it.
        evaluated = {s for s in mine if not any(s in rank for rank in ranks[: exchange.rank])}
        reference = make_reference(wanted)
        watch = OutputComparator(layout, stages, evaluated, wanted, reference, learning_rate)
    return PolicyRunner(policy, layout, parameters, exchange, meter, clock, settings.seed, watch)


def processors_of(device: torch.device, n_ranks: int) -> float | None:
    """Return how many of a pipeline's ranks compute at once; None if each has its own device."""
    if device.type != "cpu":
        return None
    n_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())
    n_threads = torch.get_num_threads()
    cores = shared_cores(n_local_ranks, n_threads)
    if cores is None:
        if n_local_ranks > 1 and n_local_ranks * n_threads >= usable_cores():
            logger.info(
                "%d ranks compute on all cores and leave none to messages; batches may take longer "
                "than predicted",
                n_local_ranks,
            )
        return None
    logger.info(
        "%d ranks share %g cores; the plan and its prediction take that into account",
        n_local_ranks,
        cores,
    )
    return cores * n_ranks / n_local_ranks


def optimizer_errors(policy: FreezePolicy | None) -> Iterator[str]:
    """Yield what lacks an optimizer where none was handed over."""
    measurement = None if policy is None else policy.measurement
    needs = {
        "looks at the learning rate": isinstance(policy, ComparesOutputs),
        "watches gradients, which have to be read between the optimizer's step and zero_grad": (
            measurement is not None and measurement.source is not Source.UPDATES
        ),
    }
    for why in (why for why, is_so in needs.items() if is_so):
        yield f"optimizer is None; {policy!r} {why}, so hand over the optimizer"


def check_alike(
    exchange: Exchange, settings: FreezeSettings, given: Mapping[str, Any], **whether: Any
) -> None:
    """Compare arguments across ranks, each of which plans and draws by its own.

    All ranks call this together. Objects of ``given`` are compared as they are written, or by their
    kind; what ``whether`` names must be given on all ranks or on none.
    """
    values = {
        **{field.name: repr(getattr(settings, field.name)) for field in fields(settings)},
        **{name: _written(value) for name, value in given.items()},
        **{name: "given" if value else "None" for name, value in whether.items()},
    }
    ranks = exchange.all_gather(values)
    errors = [
        f"{name} is {ranks[0][name]} on rank 0 and {theirs[name]} on rank {number}"
        for number, theirs in enumerate(ranks)
        for name in values
        if theirs[name] != ranks[0][name]
    ]
    if errors:
        raise ValueError(f"{'; '.join(errors)}; every rank needs the same arguments")


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    return repr(value) if is_dataclass(value) else type(value).__qualname__
