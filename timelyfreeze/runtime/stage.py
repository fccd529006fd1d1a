"""A pipeline stage with timed actions and parameters frozen by microbatch.

Every schedule of ``torch.distributed.pipelining`` calls the same few methods of a stage, so a
single subclass serves them all. Without a recorder and masks the behaviour is the base class's.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn, no_grad
from torch.distributed.fsdp import FSDPModule

from timelyfreeze.runtime.entering.stage import (
    AT_THE_FRONT,
    EMBEDDING,
    EnteringStage,
    FrozenBlocks,
)
from timelyfreeze.runtime.linear import LinearGroup, StageLinears, linears_of, stage_parameters
from timelyfreeze.runtime.low_rank import first_basis
from timelyfreeze.runtime.masked_backward import (
    CompiledBlocks,
    accumulation_nodes,
    drop_frozen,
    masked_full_backward,
    wants_gradients,
    zero_gradients,
)
from timelyfreeze.runtime.recorder import ActionRecorder
from timelyfreeze.runtime.shards import parameters_of_graph
from timelyfreeze.runtime.torch_pipelining import (
    announce_reduction,
    keep_gradients_unreduced,
    settle_unsharded_gradients,
)
from timelyfreeze.schedule import Action, ActionKind
from timelyfreeze.settings import key

NOTHING_FROZEN: Mapping[int, NDArray[np.bool_]] = {}


class FreezingStage(EnteringStage):
    """Pipeline stage with a backward without the weight gradients of frozen parameters.

    Constructed as any ``PipelineStage``, or from a plain stage (``adopt_stages``); then
    :meth:`attach` a recorder. Before each batch, :meth:`freeze` sets its masks.
    """

    recorder: ActionRecorder | None = None
    # those of the module where it computes in 16 bits, or those whose frozen weights learn
    _linears: StageLinears | None = None
    _masks: Mapping[int, NDArray[np.bool_]] = NOTHING_FROZEN
    on_loss: Callable[[Tensor], None] | None = None  # told each microbatch's loss, if it has one

    def attach(
        self,
        recorder: ActionRecorder,
        *,
        per_tensor: bool = False,
        gradient_rank: int = 0,
        seed: int = 0,
    ) -> None:
        """Start timing actions with ``recorder`` and accept masks.

        Names and sizes of the parameters are looked up now, so parallelisms must be applied before.
        With ``per_tensor`` a first stage runs the chain of input gradients down to the embedding's
        output even without live parameters near, so that backward time falls linearly with the
        freeze ratio. ``gradient_rank`` is the number of directions with a gradient for frozen
        linear weights; no other parameter is frozen then. 0: none, as in the paper.
        """
        self.recorder = recorder
        named = self.named_stage_parameters()
        self.parameter_names = tuple(name for name, _ in named)
        self.parameter_sizes = np.array([p.numel() for _, p in named], dtype=np.int64)
        self._blocks = CompiledBlocks(self.submod)
        self._frozen_blocks = FrozenBlocks(self.submod, self.parameter_names)
        self._untrained = np.array([not p.requires_grad for _, p in named], dtype=np.bool_)
        self.exact = self._untrained.copy()  # which no mask freezes
        joined: list[LinearGroup] = []
        if gradient_rank:
            # Norms, biases and embeddings cost little, and no subspace would make them cheaper.
            self._linears = linears = self.linears or StageLinears(self.submod)
            linears.learn_frozen(gradient_rank, partial(first_basis, seed=seed))
            self.exact |= [n not in linears.weights for n, _ in named]
            joined = linears.groups
        if self.linears is not None:
            self.linears.is_staged = True
        self.frozen_together = self._units(joined)
        self._compiles_both = False
        self._microbatch = -1
        self.applied_ratios: dict[int, float] = {}
        self.message_bytes = 0  # size of what this stage sends to the next
        self._embedding_output: Tensor | None = None
        self.freeze_nothing()
        if per_tensor and self.is_first:
            self._watch_embedding()

    def named_stage_parameters(self) -> list[tuple[str, Tensor]]:
        """Return the stage's parameters (shards of them under FSDP), as in the optimizer.

        Names are the model's without wrappers, and so unique over all stages.
        """
        return stage_parameters(self.submod)

    @property
    def linears(self) -> StageLinears | None:
        """The linear layers of the stage, where torch does not compute their gradients alone."""
        return self._linears or linears_of(self.submod)

    @property
    def low_rank(self) -> StageLinears | None:
        """The linear layers of the stage, if frozen ones learn in subspaces."""
        linears = self.linears
        return linears if linears is not None and linears.dimension else None

    @property
    def has_compiled_blocks(self) -> bool:
        """Whether blocks are compiled, and so frozen whole."""
        return bool(self._blocks.positions)

    def _units(self, groups: Sequence[LinearGroup]) -> tuple[tuple[int, ...], ...]:
        """Return the parameters frozen together: of compiled blocks, and of ``groups``."""
        blocks = [tuple(i for i in b if not self.exact[i]) for b in self._blocks.positions]
        inside = {i for block in blocks for i in block}
        place = {name: i for i, name in enumerate(self.parameter_names)}
        joined = [tuple(sorted(place[name] for name in group.names)) for group in groups]
        return *blocks, *(g for g in joined if len(g) > 1 and g[0] not in inside)

    def freeze(
        self, masks: Mapping[int, NDArray[np.bool_]], *, without_input_grads: Collection[int] = ()
    ) -> None:
        """Set the masks of the coming batch.

        A microbatch's mask, shape [n_parameters], is True where frozen; the same within a group of
        ``frozen_together``. A missing microbatch freezes nothing. For microbatches of
        ``without_input_grads`` every stage in front is frozen whole: the chain of input gradients
        ends at this stage's first live tensor, and the stage in front, expecting a gradient, gets
        zeros. Tensors that require no gradient are frozen with any other.
        """
        self._masks = {m: mask | self._untrained for m, mask in masks.items()}
        self._without_input_grads = without_input_grads
        self.applied_ratios = {}
        # A block that FSDP gathers would have to be run a second time with its hooks.
        if not self._compiles_both and not isinstance(self.submod, FSDPModule):
            self._compiles_both = True
            self._blocks.compile_frozen(self.exact)

    def freeze_nothing(self) -> None:
        """Forget the masks of the last batch, keeping the report of applied masks."""
        self._entry = AT_THE_FRONT
        self._masks = NOTHING_FROZEN
        self._without_input_grads = ()
        self._chain_ends: dict[int, Tensor] = {}
        self._postponed: dict[int, dict[str, Any]] = {}
        if self.linears is not None:
            self.linears.end_batch()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run and time a microbatch's forward; in front of the batch's entry, do nothing."""
        if self._is_passed:
            with self._timed(ActionKind.FORWARD, fwd_chunk_id):
                announce_reduction(self.submod)
            return None
        compiled: AbstractContextManager[None] = nullcontext()
        if self._active:  # they have to know what will be frozen
            compiled = self._blocks.without_weight_gradients(self._masks.get(fwd_chunk_id))
        with (
            self._timed(ActionKind.FORWARD, fwd_chunk_id),
            compiled,
            self._linear_action(fwd_chunk_id),
            self._noted(fwd_chunk_id),
        ):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self._active and not self.is_last:
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            self.message_bytes = sum(t.nbytes for t in outputs if isinstance(t, Tensor))
        if self._active and self._embedding_output is not None:
            self._chain_ends[fwd_chunk_id] = self._embedding_output
            self._embedding_output = None
        return output

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; without a later backward, keep no activations."""
        # The stage's inputs stay outside of no_grad: whether they require grad says what the
        # stage in front expects to get back.
        with self._graph_of(self._forwarded), self._entered():
            return super().forward_maybe_with_nosync(*self._entering(args), **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run and time a microbatch's full backward, or the input half of a split backward."""
        self._microbatch = bwd_chunk_id
        if loss is not None and self.on_loss is not None:
            self.on_loss(loss)
        kind = ActionKind.FULL_BACKWARD if full_backward else ActionKind.INPUT_BACKWARD
        if self._is_passed:
            self._pass_backward(kind, bwd_chunk_id)
            return
        with self._timed(kind, bwd_chunk_id):
            super().backward_one_chunk(
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )
            if last_backward and full_backward and self.linears is not None:
                self.linears.add_to_gradients()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run and time the weight half of a microbatch's split backward."""
        self._microbatch = bwd_chunk_id
        if self._is_passed:
            self._pass_backward(ActionKind.WEIGHT_BACKWARD, bwd_chunk_id)
            return
        with self._timed(ActionKind.WEIGHT_BACKWARD, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
            if last_backward and self.linears is not None:
                self.linears.add_to_gradients()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run the common backward of all of the above, without the frozen part.

        ``backward_type`` is "full", "input" or "weight". The input half has no weight gradients to
        skip. A first stage does its whole split backward as a "full" one in the weight half.
        """
        if self.linears is not None and backward_type == "weight":
            self.linears.run_postponed(self._microbatch)
        with self._linear_action(self._microbatch, postpones=backward_type == "input"):
            if not self._active:
                return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            return self._masked_backward(backward_type, bwd_kwargs, last_backward)

    def _linear_action(
        self, microbatch: int, *, postpones: bool = False
    ) -> AbstractContextManager[None]:
        """Return the context of an action, by which linear layers know their mask."""
        if self.linears is None:
            return nullcontext()
        mask = self._masks.get(microbatch) if self._active else None
        frozen: set[str] = set()
        if mask is not None:
            names = zip(self.parameter_names, mask, strict=True)
            frozen = {name for name, is_frozen in names if is_frozen}
        return self.linears.action_of(microbatch, frozen, postpones=postpones)

    def _masked(self, microbatch: int) -> NDArray[np.bool_] | None:
        """Return a microbatch's frozen weights, but for weights without any subspace."""
        mask = self._masks.get(microbatch)
        if mask is None or self.linears is None or not self.linears.without_chain:
            return mask
        return mask & [name not in self.linears.without_chain for name in self.parameter_names]

    def _masked_backward(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Do a backward without the weight gradients of frozen tensors."""
        mask = self._masked(self._microbatch)
        chain_end = self._chain_ends.pop(self._microbatch, None)
        if backward_type != "input":
            self.applied_ratios[self._microbatch] = self._frozen_ratio(mask)
        if self._lacks_input_grads(backward_type, bwd_kwargs) and not self.is_first:
            return self._backward_without_input_grads(backward_type, bwd_kwargs, mask)
        if backward_type == "input" or mask is None or not mask.any():
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type == "weight":
            parameters = parameters_of_graph(self.submod, self._left_out())
            pairs = zip(parameters, mask & ~self._untrained, strict=True)
            frozen = [p for p, is_frozen in pairs if is_frozen]
            groups = drop_frozen(bwd_kwargs["param_groups"], accumulation_nodes(frozen))
            return super().backward_maybe_with_nosync(
                "weight", {**bwd_kwargs, "param_groups": groups}, last_backward
            )
        return self._masked_full(bwd_kwargs, mask, bwd_kwargs["input_values"], chain_end), None

    def _lacks_input_grads(self, backward_type: str, bwd_kwargs: dict[str, Any]) -> bool:
        """Return whether a backward ends inside the stage.

        Behind stages without a graph torch would lose the weight gradients of a split backward.
        """
        if self._microbatch in self._without_input_grads or self._microbatch in self._postponed:
            return True
        return backward_type == "input" and not wants_gradients(bwd_kwargs["input_values"])

    def _backward_without_input_grads(
        self, backward_type: str, bwd_kwargs: dict[str, Any], mask: NDArray[np.bool_] | None
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
        """Run a backward down to the first live tensor; the stage in front gets zeros.

        Nobody waits for the input half of a split backward. The weight half does all the rest, as
        in a first stage.
        """
        if backward_type == "input":
            self._postponed[self._microbatch] = dict(bwd_kwargs)  # the base class empties its own
            return zero_gradients(bwd_kwargs["input_values"]), []
        if backward_type == "weight":
            bwd_kwargs = self._postponed.pop(self._microbatch)
        if mask is None:
            mask = self._untrained
        self._masked_full(bwd_kwargs, mask, ())
        return zero_gradients(bwd_kwargs["input_values"]), []

    def _masked_full(
        self,
        bwd_kwargs: dict[str, Any],
        mask: NDArray[np.bool_],
        stage_inputs: Sequence[Any],
        chain_end: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Run a full backward for the live parameters and ``stage_inputs``."""
        if mask.all() and not wants_gradients(stage_inputs) and chain_end is None:
            return (None,) * len(stage_inputs)
        if isinstance(self.submod, FSDPModule):
            keep_gradients_unreduced(self.submod)
        parameters = parameters_of_graph(self.submod, self._left_out())
        live = [p for p, is_frozen in zip(parameters, mask, strict=True) if not is_frozen]
        if self.linears is not None:
            live += self.linears.targets()
        outputs, output_grads = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
        return masked_full_backward(outputs, output_grads, stage_inputs, live, chain_end)

    def _graph_of(self, microbatch: int) -> AbstractContextManager[None]:
        """Return the context of the module's forward, without activations for skipped backwards."""
        mask = self._masks.get(microbatch) if self._active else None
        if mask is None or microbatch not in self._without_input_grads:
            return nullcontext()
        if mask.all():
            return no_grad()
        # A compiled block is one graph, that of its first forward.
        return (
            nullcontext() if self.has_compiled_blocks else self._frozen_blocks.without_graph(mask)
        )

    def _frozen_ratio(self, mask: NDArray[np.bool_] | None) -> float:
        if mask is None:
            return 0.0
        whole = int(self.parameter_sizes[~self.exact].sum())
        return int(self.parameter_sizes[mask & ~self.exact].sum()) / whole if whole else 0.0

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the batch's gradients over data-parallel replicas, masked ones included."""
        recorder = self.recorder if self._active else None
        with nullcontext() if recorder is None else recorder.beside_actions():
            if recorder is not None and isinstance(self.submod, FSDPModule):
                settle_unsharded_gradients(self.submod)
            super().perform_reduce_grad(grad_scale_factor)

    def _pass_backward(self, kind: ActionKind, microbatch: int) -> None:
        """Note a backward without work: all its targets are frozen."""
        with self._timed(kind, microbatch):
            if kind is not ActionKind.INPUT_BACKWARD:
                self.applied_ratios[microbatch] = self._frozen_ratio(self._masks.get(microbatch))
            if kind is not ActionKind.WEIGHT_BACKWARD:
                self.bwd_cache[microbatch] = ()

    @property
    def _active(self) -> bool:
        """Whether this is training; evaluation runs with clocks and masks off."""
        return self.recorder is not None and self.has_backward

    def _timed(self, kind: ActionKind, microbatch: int) -> AbstractContextManager[None]:
        if self.recorder is None or not self.has_backward:
            return nullcontext()
        return self.recorder.measure(Action(self.stage_index, kind, microbatch))

    def _watch_embedding(self) -> None:
        embeddings = [
            module
            for name, module in self.submod.named_modules()
            if name == EMBEDDING or isinstance(module, nn.Embedding)  # of patches, or of tokens
        ]
        if not embeddings:
            raise ValueError(
                f'{key("first_stage")} is "per_tensor", which needs an nn.Embedding, or a module '
                f"{EMBEDDING}, in the first stage, and {type(self.submod).__name__} has none "
                'there; set it to "all_or_nothing"'
            )

        def remember(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if self._active:
                self._embedding_output = output

        embeddings[0].register_forward_hook(remember)
