"""A whole model, such as those of transformers, cut into the modules of pipeline stages."""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from timelyfreeze.whatif.grid import layers_of_split, render_split
from timelyfreeze.whatif.partition import (
    PARAMETERS,
    TIME,
    PartParameters,
    min_max_split,
    parameter_load,
)

logger = logging.getLogger(__name__)


def partition_model(
    model: nn.Module,
    n_stages: int,
    example: Tensor,
    *,
    by: str = TIME,
    blocks: str | None = None,
    **kwargs: Any,
) -> list[nn.Module]:
    """Cut a model with one list of blocks into modules for ``PipelineStage``, front to back.

    A stage is the model without the blocks of other stages. It shares weights and their names with
    ``model``, and takes its keyword arguments. Embeddings are in the first stage, the head in the
    last, which returns the model's first output. The largest load of a stage is the least possible.

    Args:
        model: The model. It runs once, on the example.
        n_stages: Number of stages.
        example: First argument of ``model``, a small one: token numbers or pictures.
        by: "time" balances multiplications on the example, "parameters" numbers of parameters.
        blocks: Name of the list of blocks, where there are several lists.
        kwargs: Keyword arguments of ``model`` on the example.

    Raises:
        ValueError: If the model cannot be cut so, or an argument breaks a rule.
    """
    if by not in (TIME, PARAMETERS):
        raise ValueError(f'by is {by!r}; it must be "{TIME}" or "{PARAMETERS}"')
    chain = _Chain(model, blocks or _find_blocks(model))
    times = chain.run(example, kwargs)
    load = parameter_load(times if by == TIME else chain.parameters(), range(n_stages))
    # Behind the first, a stage has a block for its input to enter at.
    load = replace(load, least=tuple(min(stage, 1) for stage in range(n_stages)))
    split = min_max_split(len(chain.blocks), load)
    stages = [chain.stage(span.start, span.stop) for span in layers_of_split(split)]
    home: dict[Tensor, int] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if home.setdefault(parameter, number) != number:
                raise ValueError(
                    f"parameter {name!r} is used in stages {home[parameter]} and {number}, each of "
                    "which would have a part of its gradient; blocks of one weight must come into "
                    "one stage"
                )
    logger.info("%s is cut by %s into %s of %s", chain.kind, by, render_split(split), chain.path)
    return stages


class _Done(Exception):
    """The hidden states behind the last block of a stage."""


class _Entry:
    """Hidden states that enter a stage, as its first block takes them."""

    hidden: Tensor | None = None

    def __init__(self, argument: str | None, *, as_tuple: bool) -> None:
        self.argument, self.as_tuple = argument, as_tuple


class _Absent(nn.Module):  # type: ignore[misc]
    """In place of a part of another stage, in front if there is an ``entry``, else behind.

    In front it returns the hidden states of the entry, behind it ends the forward with its input.
    It has the attributes of ``likeness``, an empty copy of the part.
    """

    def __init__(
        self, likeness: nn.Module, entry: _Entry | None, *, is_block: bool = False
    ) -> None:
        super().__init__()
        self._likeness = (likeness,)  # in a tuple it is no part of the stage
        self._entry, self._is_block = entry, is_block

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            (likeness,) = vars(self).get("_likeness", (None,))
            return getattr(likeness, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._entry is None:
            raise _Done(_first(args, kwargs))
        hidden = self._entry.hidden
        return (hidden,) if self._is_block and self._entry.as_tuple else hidden


class ModelStage(nn.Module):  # type: ignore[misc]
    """Mixed into a model's class: the forward of a stage."""

    entry: _Entry

    def forward(self, entering: Tensor, **kwargs: Any) -> Tensor:
        """Return hidden states for the next stage, or the model's first output."""
        self.entry.hidden, name = entering, self.entry.argument
        try:
            if name is None:
                output = super().forward(entering, **kwargs)
            else:
                output = super().forward(**{name: entering}, **kwargs)
        except _Done as done:
            output = done.args[0]
        finally:
            self.entry.hidden = None
        return output if isinstance(output, Tensor) else output[0]


class _Chain:
    """The blocks of a model, and what runs in front of them and behind."""

    def __init__(self, model: nn.Module, path: str) -> None:
        self._model, self.path, self.kind = model, path, type(model).__name__
        self._names = path.split(".")
        self.blocks: dict[str, nn.Module] = dict(model.get_submodule(path)._modules)
        self._beside: set[nn.Module] = set()
        for depth, inner in enumerate(self._names):
            around = model.get_submodule(".".join(self._names[:depth]))
            for name, _ in around.named_parameters(recurse=False):
                raise ValueError(
                    f"{type(around).__name__} has parameter {name!r} beside its blocks; put it "
                    "into a module that runs in front of the blocks or behind"
                )
            parts = around.named_children()
            self._beside |= {part for name, part in parts if name != inner and _size(part)}
        self._front: set[nn.Module] = set()  # of those
        self._behind: set[nn.Module] = set()
        self._as_tuple = False
        self._likenesses: dict[nn.Module, nn.Module] = {}

    def run(self, example: Tensor, kwargs: Mapping[str, Any]) -> PartParameters:
        """Run the model, and return multiplications; a ValueError if blocks are no chain."""
        whole, counter = self.stage(0, len(self.blocks)), FlopCounterMode(display=False)
        begun: list[int] = []
        ended: list[int] = []
        outputs: list[Any] = []
        blocks = [*self.blocks.values()]

        def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = _first(args, kwargs)
            others = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            if len(begun) == len(blocks) or block is not blocks[len(begun)]:
                raise self._refusal("does not run each once, in their order")
            if outputs and hidden is not outputs[-1]:
                raise self._refusal("changes hidden states between them")
            if any(t.requires_grad and t is not hidden for t in others):
                raise self._refusal(
                    "hands them something learned besides hidden states, as relative positions or "
                    "the output of an encoder are, whose gradient would be missing"
                )
            begun.append(counter.get_total_flops())

        def leave(block: nn.Module, args: Any, output: Any) -> None:
            self._as_tuple = isinstance(output, tuple)
            outputs.append(output[0] if self._as_tuple else output)
            ended.append(counter.get_total_flops())

        def call(part: nn.Module, args: Any) -> None:
            self._front |= set() if begun else {part}

        handles = [part.register_forward_pre_hook(call) for part in self._beside]
        for block in dict.fromkeys(blocks):
            handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(block.register_forward_hook(leave))
        try:
            with torch.enable_grad(), torch.random.fork_rng(), counter:
                whole(example, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        if len(ended) < len(blocks):
            raise self._refusal(f"runs {len(ended)} of {len(blocks)}")
        self._behind = self._beside - self._front
        of_blocks = tuple(b - a for a, b in zip(begun, ended, strict=True))
        return PartParameters(begun[0], of_blocks, counter.get_total_flops() - ended[-1])

    def _refusal(self, why: str) -> ValueError:
        return ValueError(f"the blocks of {self.path} are no chain: {self.kind} {why}")

    def parameters(self) -> PartParameters:
        """Return numbers of parameters, once the model has run."""
        first, last = (sum(map(_size, parts)) for parts in (self._front, self._behind))
        return PartParameters(first, tuple(map(_size, self.blocks.values())), last)

    def stage(self, start: int, stop: int) -> nn.Module:
        """Return the model with blocks from ``start`` to ``stop`` alone."""
        is_first, is_last = start == 0, stop == len(self.blocks)
        takes_hidden = "inputs_embeds" in signature(self._model.forward).parameters
        argument = "inputs_embeds" if takes_hidden and not is_first else None
        entry = _Entry(argument, as_tuple=self._as_tuple)
        absent: dict[nn.Module, _Entry | None] = {}
        absent |= dict.fromkeys(() if is_first else self._front, entry)
        absent |= dict.fromkeys(() if is_last else self._behind, None)
        made = around = _shallow(self._model)
        for inner in self._names:
            for name, part in around.named_children():
                if part in absent:
                    around.add_module(name, _Absent(self._likeness(part), absent[part]))
                elif part in self._behind and not is_first:
                    around.add_module(name, self._head(part))
            around.add_module(inner, _shallow(getattr(around, inner)))
            around = getattr(around, inner)
        for place, (name, block) in enumerate(self.blocks.items()):
            if not start <= place < stop:
                where = entry if place < start else None
                around.add_module(name, _Absent(self._likeness(block), where, is_block=True))
        kind = type(self._model)
        made.__class__ = type(f"{self.kind}Stage", (ModelStage, kind), {})
        made.entry = entry
        return made

    def _likeness(self, part: nn.Module) -> nn.Module:
        if part not in self._likenesses:
            empty = {id(t): t.detach().to("meta") for t in (*part.parameters(), *part.buffers())}
            self._likenesses[part] = copy.deepcopy(part, empty)
        return self._likenesses[part]

    def _head(self, part: nn.Module) -> nn.Module:
        """Return a part behind; a copy where its weights are those of embeddings, too."""
        front = {p for each in self._front for p in each.parameters()}
        if front.isdisjoint(part.parameters()):
            return part
        logger.warning(
            "The head of %s has the weights of its embeddings; here it starts as a copy of them "
            "and is trained apart, so save the model with tie_word_embeddings=False",
            self.kind,
        )
        return copy.deepcopy(part)


def _find_blocks(model: nn.Module) -> str:
    """Return the name of a model's only list of blocks."""
    lists: list[str] = []
    for name, part in model.named_modules():
        is_inside = any(name.startswith(f"{known}.") for known in lists)
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)) and _size(part) and not is_inside:
            lists.append(name)
    if len(lists) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(lists)} lists of blocks ({', '.join(lists)}); a "
            "pipeline is one chain, an nn.ModuleList or nn.ModuleDict: name it, blocks=..."
        )
    return lists[0]


def _first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a call: hidden states."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _shallow(module: nn.Module) -> Any:
    """Return a module of its own with the same children, which caches no keys and values."""
    made: Any = object.__new__(type(module))
    made.__dict__ = {k: copy.copy(v) if isinstance(v, dict) else v for k, v in vars(module).items()}
    if getattr(getattr(module, "config", None), "use_cache", False):
        made.config = copy.copy(module.config)
        made.config.use_cache = False
    return made
