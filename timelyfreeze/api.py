"""Freezing in a trainer of one's own, on ``torch.distributed.pipelining``."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from timelyfreeze.control import (
    FreezeReport,
    Reporter,
    attach_clocks,
    build_controller,
    processors_of,
)
from timelyfreeze.control.build import check_alike, optimizer_errors
from timelyfreeze.control.dimensions import with_rank
from timelyfreeze.front.caching import NamedRows, Row
from timelyfreeze.front.caching.library import cache_errors, front_identity, opened
from timelyfreeze.planning import FreezePlan
from timelyfreeze.policies import FreezePolicy, chosen_policy
from timelyfreeze.runtime import (
    ActionRecorder,
    adopt_stages,
    clock_for,
    exchange_of,
    has_loss,
    read_order,
    run_batches_in,
    stages_of,
    together,
)
from timelyfreeze.settings import ActivationCache, FreezeSettings, Phase
from timelyfreeze.timing import DurationBounds

logger = logging.getLogger(__name__)

# Every so many steps what was measured is exchanged, so that it does not pile up.
_COLLECT_EVERY = 50


class TimelyFreeze(AbstractContextManager["TimelyFreeze"]):
    """Measures a pipeline's batches, plans the freezing, and freezes.

    ::

        freezer = TimelyFreeze(schedule, last_warmup_step=60, last_ramp_step=200)
        for t, batch in enumerate(batches, start=1):
            with freezer.step(t):
                schedule.step(batch)
            optimizer.step()
            optimizer.zero_grad()

    All ranks build and use the class alike. ``docs/library.md`` tells more.

    Args:
        schedule: A schedule of ``torch.distributed.pipelining`` with a loss function. Its stages,
            plain or not, become freezing ones in place; parallelisms must have been applied.
        method: "timelyfreeze", the name of a policy, "timelyfreeze+<policy>", or a policy, which
            then decides alone.
        policy: Settings of the policy that ``method`` names, or for "timelyfreeze" a policy.
        optimizer: The optimizer or optimizers of this rank. Policies that watch gradients need
            them: they look right after a step.
        pipeline_group: The processes of this pipeline; None for the group of the stages.
        data_parallel_group: The processes with the same stages: replicas, and processes among which
            tensors are split. Where neither group is named, all processes of the default group take
            part.
        device: Where the stages compute; None for the device of their weights.
        on_plan: Called on every rank with each new plan and its bounds.
        cache: Reads the stored outputs of a frozen front, for a policy without a plan; None to
            compute them always.
        settings: Fields of :class:`timelyfreeze.FreezeSettings`, such as ``last_warmup_step``,
            ``max_freeze_ratio``, ``gradient_rank`` and others.

    Raises:
        ValueError: If an argument breaks a rule, or the pipeline cannot be frozen.
    """

    def __init__(
        self,
        schedule: Any,
        *,
        method: str | FreezePolicy = "timelyfreeze",
        policy: FreezePolicy | Mapping[str, Any] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        pipeline_group: dist.ProcessGroup | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        on_plan: Callable[[FreezePlan, DurationBounds], None] | None = None,
        cache: ActivationCache | None = None,
        **settings: Any,
    ) -> None:
        plans, chosen = chosen_policy(method, policy)
        wanted = FreezeSettings(**settings)
        order = read_order(schedule)
        each = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        optimizers = [one for one in each if one is not None]
        errors = [
            *wanted.errors(plans=plans, n_stages=order.n_stages),
            *([] if optimizers else optimizer_errors(chosen)),
        ]
        if not has_loss(schedule):
            errors.append("schedule has no loss_fn; without one there is no backward to freeze")
        if cache is not None:
            errors += cache_errors(cache, method, plans=plans)
        if errors:
            raise ValueError("; ".join(errors))
        wanted = wanted if plans else wanted.unplanned
        stages = adopt_stages(stages_of(schedule))
        self._rows: NamedRows | None = None
        if cache is not None:
            self._rows = NamedRows(stages, order.n_microbatches)
            for stage in stages:
                stage.find_blocks(cache.layers, cache.embedding)
        self._exchange = exchange_of(stages, pipeline_group, data_parallel_group)
        given = {"method": method, "policy": chosen}
        with together("TimelyFreeze(...)"):
            check_alike(self._exchange, wanted, given, optimizer=optimizers, cache=cache)
            wanted = with_rank(wanted, stages, self._exchange)
        where = torch.device(stages[0].device if device is None else device)
        n_processors = processors_of(where, order.n_ranks)
        recorder = ActionRecorder(clock_for(where, shared=n_processors is not None))
        attach_clocks(stages, recorder, wanted)
        with opened(cache) as store:
            self._controller = build_controller(
                stages,
                order,
                wanted,
                chosen,
                recorder,
                device=where,
                exchange=self._exchange,
                n_processors=n_processors,
                on_solved=on_plan or (lambda plan, bounds: None),
                optimizers=optimizers,
                store=store,
                front_identity=front_identity(cache, where),
            )
        self._stages = stages
        self._parameters = [named for stage in stages for named in stage.named_stage_parameters()]
        self._reporter = Reporter(self._controller)
        self._undo: list[Callable[[], None]] = [
            run_batches_in(schedule, self._one_batch, recorder.measure_more)
        ]
        self._step = 0
        self._is_inside = self._is_open = self._is_fresh = False
        self._watch(optimizers)

    # -- the step ----------------------------------------------------------------------------------

    @contextmanager
    def step(
        self,
        t: int,
        rows: Sequence[Sequence[Row]] | None = None,
        upcoming: Sequence[Sequence[int]] = (),
    ) -> Iterator[None]:
        """Run the batches of an optimizer step, ``schedule.step(...)`` once or more, inside.

        The step ends, for policies and for the plan, after the optimizer's step if an optimizer was
        handed over, otherwise at the beginning of the next. Then ranks may talk to each other.

        Args:
            t: Number of the step, from 1; after a resume where the run had stopped.
            rows: With a cache, the rows of the step's batches in order, the same on all ranks of a
                pipeline.
            upcoming: With a cache on a disk, the row numbers of the next batches, to be read ahead;
                none where they are not known.

        Raises:
            RuntimeError: Inside another step, or if a batch begins while gradients are there.
            ValueError: If ``t`` is below 1 or no later than the step before, or ``rows`` are not
                those of the batches.
        """
        if self._is_inside:
            raise RuntimeError(f"step {t} begins inside step {self._step}")
        if self._step and t <= self._step:
            raise ValueError(
                f"step {t} comes after step {self._step}; optimizer steps count upwards through "
                "the whole run, over all epochs"
            )
        if self._rows is not None:
            self._rows.begin_step(t, rows)
        elif rows is not None or upcoming:
            raise ValueError(
                f"step {t} names rows, and cache is None; leave them out, or hand over "
                "cache=ActivationCache()"
            )
        self._end_step()
        self._controller.begin_step(t)
        cache = self._controller.cache
        if self._rows is not None and cache is not None:
            cache.name_batches(self._rows.batches)
            cache.read_ahead(lambda n: [[int(row) for row in batch] for batch in upcoming[:n]])
        self._step = t
        self._is_inside = self._is_open = self._is_fresh = True
        try:
            yield
        finally:
            self._is_inside = False
        if self._rows is not None:
            self._rows.end_step()

    @contextmanager
    def _one_batch(self) -> Iterator[None]:
        if not self._is_inside:
            raise RuntimeError(
                "schedule.step(...) was called outside of `with freezer.step(t):`; put it inside, "
                "or call freezer.close() to train without freezing"
            )
        if self._is_fresh:
            self._check_no_gradients()
            self._is_fresh = False
        with self._rows.one_batch() if self._rows else nullcontext(), self._controller.one_batch():
            yield

    def _check_no_gradients(self) -> None:
        """Require no gradients on tensors about to be frozen."""
        name = next((name for name, p in self._parameters if p.grad is not None), None)
        if name is not None:
            raise RuntimeError(
                f"parameter {name!r} has a gradient when step {self._step} computes its first, and "
                "the optimizer would move it by that though it is frozen; between steps call "
                "optimizer.zero_grad(), which sets gradients to None (set_to_none=True)"
            )

    def _end_step(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._controller.end_step()
        if self._step % _COLLECT_EVERY == 0:
            self._reporter.collect()

    def _watch(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """End a step once all optimizers have made theirs."""
        done: set[int] = set()

        def after_step(stepped: torch.optim.Optimizer, *args: Any) -> None:
            done.add(id(stepped))
            if len(done) == len(optimizers):
                done.clear()
                self._end_step()

        for each in optimizers:
            self._undo.append(each.register_step_post_hook(after_step).remove)

    # -- what is known -----------------------------------------------------------------------------

    @property
    def plan(self) -> FreezePlan | None:
        """The current plan, if any."""
        return self._controller.plan

    @property
    def bounds(self) -> DurationBounds | None:
        """The measured bounds of the plan."""
        return self._controller.active_plan.bounds

    @property
    def phase(self) -> Phase:
        """The phase of the current step; the first phase before any step."""
        return self._controller.step.phase if self._step else self._controller.phases.phase(1)

    def report(self) -> FreezeReport:
        """Return measurements and plan; a collective call of all ranks.

        For use between two steps. Waits for the device.
        """
        self._end_step()
        with together("report()"):
            return self._reporter.report(self._step)

    # -- checkpoint --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; a collective call of all ranks.

        Returns:
            Texts, of all ranks on every rank, and this rank's vectors of policies, tensors.
        """
        self._end_step()
        mine = self._controller.state_dict()
        texts = {name: value for name, value in mine.items() if isinstance(value, str)}
        with together("state_dict()"):
            for theirs in self._exchange.all_gather(texts):
                mine |= theirs
        return mine

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`; to be called before the first step.

        Raises:
            ValueError: If the state is of another pipeline or of another method.
        """
        self._controller.load_state_dict(state_dict)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """End background work, and restore the schedule."""
        if self._undo:  # the first time
            self._controller.close()
            why = self._controller.planner.unplanned(self._controller.step) if self._step else None
            if why is not None and self._exchange.rank == 0:
                logger.warning("Nothing was frozen by a plan: %s", why)
        while self._undo:
            self._undo.pop()()
        for stage in self._stages:
            stage.recorder = None

    def __exit__(self, *error: object) -> None:
        """Close; ``with`` has given the freezer itself."""
        self.close()
