"""A whole model, such as those of transformers, cut into the modules of pipeline stages."""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    stage_to_rank: Sequence[int] | None = None,
    blocks: str | None = None,
    **example_kwargs: Any,
) -> list[nn.Module]:
    """Cut a model with one list of blocks into modules for ``PipelineStage``, front to back.

    A stage is the model without the blocks of other stages. It shares weights and their names with
    ``model``, and takes its keyword arguments. Embeddings are in the first stage, the head in the
    last, which returns the model's first output. The largest load of a rank is the least possible.

    Args:
        model: The model. It runs once on the example.
        n_stages: Number of stages.
        example: First argument of ``model``, a small one: token numbers or pictures.
        by: "time" balances multiplications on the example, "parameters" numbers of parameters.
        stage_to_rank: The rank of each stage, where ranks have several; None for one each.
        blocks: Name of the list of blocks, where there are several lists.
        example_kwargs: Keyword arguments of ``model`` on the example.

    Raises:
        ValueError: If the model cannot be cut so, or an argument breaks a rule.
    """
    if by not in (TIME, PARAMETERS):
        raise ValueError(f'by is {by!r}; it must be "{TIME}" or "{PARAMETERS}"')
    chain = _Chain(model, _find_blocks(model) if blocks is None else blocks)
    ranks = range(n_stages) if stage_to_rank is None else stage_to_rank
    if len(ranks) != n_stages:
        raise ValueError(f"stage_to_rank has {len(ranks)} ranks; it needs one for each stage")
    loads = chain.run(example, example_kwargs)
    load = parameter_load(loads if by == TIME else chain.parameters(), ranks)
    # Behind the first, a stage has a block for its input to enter at.
    least = tuple(min(stage, 1) for stage in range(n_stages))
    split = min_max_split(len(chain.blocks), replace(load, least=least))
    stages = [chain.stage(span.start, span.stop) for span in layers_of_split(split)]
    _check_apart(stages)
    logger.info("%s is cut by %s into %s of %s", chain.kind, by, render_split(split), chain.path)
    return stages


@dataclass
class _Cut:
    """How a stage runs its model: hidden states enter in front of its first block."""

    entry: str | None  # the argument that takes them; None for the model's first one
    as_tuple: bool  # whether blocks return tuples
    hidden: Tensor | None = field(default=None, repr=False)


class _Done(Exception):
    """The hidden states behind the last block of a stage."""


class _Absent(nn.Module):  # type: ignore[misc]
    """In place of a part of another stage, in front if there is a ``cut``, else behind.

    In front it returns the hidden states that the stage has got, behind it ends the forward with
    its input. Its attributes are those of ``likeness``, an empty copy of the part.
    """

    def __init__(self, likeness: nn.Module, cut: _Cut | None, *, is_block: bool = False) -> None:
        super().__init__()
        self._likeness = (likeness,)  # in a tuple it is no part of the stage
        self._cut, self._is_block = cut, is_block

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            (likeness,) = vars(self).get("_likeness") or (None,)
            return getattr(likeness, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._cut is None:
            raise _Done(_first(args, kwargs))
        hidden = self._cut.hidden
        return (hidden,) if self._is_block and self._cut.as_tuple else hidden


class ModelStage(nn.Module):  # type: ignore[misc]
    """Mixed into a model's class: the forward of a stage."""

    cut: _Cut

    def forward(self, entering: Tensor, **kwargs: Any) -> Tensor:
        """Return hidden states for the next stage, or the model's first output."""
        self.cut.hidden, name = entering, self.cut.entry
        try:
            if name is None:
                output = super().forward(entering, **kwargs)
            else:
                output = super().forward(**{name: entering}, **kwargs)
        except _Done as done:
            output = done.args[0]
        finally:
            self.cut.hidden = None
        return output if isinstance(output, Tensor) else output[0]


class _Chain:
    """The blocks of a model, and what runs in front of them and behind."""

    def __init__(self, model: nn.Module, path: str) -> None:
        self._model, self.path, self.kind = model, path, type(model).__name__
        self._names = path.split(".")
        *around, listed = [model.get_submodule(".".join(self._names[:n])) for n in self._depths]
        self.blocks = dict(listed._modules)
        self._beside: set[nn.Module] = set()
        for module, inner in zip(around, self._names, strict=True):
            for name, _ in module.named_parameters(recurse=False):
                raise ValueError(
                    f"{type(module).__name__} has parameter {name!r} beside its blocks; keep it in "
                    "a module that runs in front of the blocks or behind, so that a stage can "
                    "have it"
                )
            parts = module.named_children()
            self._beside |= {part for name, part in parts if name != inner and _size(part)}
        self._behind: set[nn.Module] = set()
        self._as_tuple = False
        self._likenesses: dict[nn.Module, nn.Module] = {}

    @property
    def _depths(self) -> range:
        return range(len(self._names) + 1)

    def run(self, example: Tensor, kwargs: Mapping[str, Any]) -> PartParameters:
        """Run the model, and return multiplications; a ValueError if blocks are no chain."""
        whole = self.stage(0, len(self.blocks))
        begun: list[int] = []
        ended: list[int] = []
        blocks, front, left = [*self.blocks.values()], set(), [None]

        def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
            self._check_entry(_first(args, kwargs), (*args, *kwargs.values()), left[0])
            if len(begun) == len(blocks) or block is not blocks[len(begun)]:
                raise ValueError(
                    f"{self.kind} does not run each block of {self.path} once, in their order"
                )
            begun.append(counter.get_total_flops())

        def leave(block: nn.Module, args: Any, output: Any) -> None:
            self._as_tuple = isinstance(output, tuple)
            left[0] = output[0] if self._as_tuple else output
            ended.append(counter.get_total_flops())

        def call(part: nn.Module, args: Any) -> None:
            if not begun:
                front.add(part)

        handles = [part.register_forward_pre_hook(call) for part in self._beside]
        for block in dict.fromkeys(blocks):
            handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(block.register_forward_hook(leave))
        counter = FlopCounterMode(display=False)
        try:
            with torch.enable_grad(), torch.random.fork_rng(), counter:
                whole(example, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        if len(ended) < len(blocks):
            raise ValueError(f"{self.kind} runs {len(ended)} of {len(blocks)} blocks")
        self._behind = self._beside - front
        of_blocks = tuple(b - a for a, b in zip(begun, ended, strict=True))
        return PartParameters(begun[0], of_blocks, counter.get_total_flops() - ended[-1])

    def _check_entry(self, hidden: Any, arguments: Sequence[Any], left: Tensor | None) -> None:
        """Refuse blocks that are not joined by hidden states alone."""
        if left is not None and hidden is not left:
            raise ValueError(f"{self.kind} changes hidden states between blocks of {self.path}")
        tensors = [t for t in arguments if isinstance(t, Tensor) and t is not hidden]
        if any(t.requires_grad for t in tensors):
            raise ValueError(
                f"{self.kind} hands blocks of {self.path} something learned besides hidden states, "
                "such as relative positions or the output of an encoder; its gradient would be "
                "missing without an error"
            )

    def parameters(self) -> PartParameters:
        """Return numbers of parameters, once the model has run."""
        of_blocks = tuple(map(_size, self.blocks.values()))
        first, last = self._beside - self._behind, self._behind
        return PartParameters(sum(map(_size, first)), of_blocks, sum(map(_size, last)))

    def stage(self, start: int, stop: int) -> nn.Module:
        """Return the model with blocks from ``start`` to ``stop`` alone."""
        is_first, is_last = start == 0, stop == len(self.blocks)
        names = signature(self._model.forward).parameters
        entry = "inputs_embeds" if "inputs_embeds" in names and not is_first else None
        cut = _Cut(entry, self._as_tuple)
        made = around = _shallow(self._model)
        for inner in self._names:
            for name, part in around.named_children():
                if part in self._behind:
                    own = self._head(part) if is_last else _Absent(self._likeness(part), None)
                    around.add_module(name, own)
                elif part in self._beside and not is_first:
                    around.add_module(name, _Absent(self._likeness(part), cut))
            around.add_module(inner, _shallow(getattr(around, inner)))
            around = getattr(around, inner)
        for place, (name, block) in enumerate(self.blocks.items()):
            if not start <= place < stop:
                where = cut if place < start else None
                around.add_module(name, _Absent(self._likeness(block), where, is_block=True))
        kind = type(self._model)
        made.__class__ = type(f"{self.kind}Stage", (ModelStage, kind), {})
        made.cut = cut
        return made

    def _likeness(self, part: nn.Module) -> nn.Module:
        """Return a copy of a part without memory."""
        if part not in self._likenesses:
            empty = {id(t): t.detach().to("meta") for t in (*part.parameters(), *part.buffers())}
            self._likenesses[part] = copy.deepcopy(part, empty)
        return self._likenesses[part]

    def _head(self, part: nn.Module) -> nn.Module:
        """Return a part behind; a copy where its weights are those of embeddings, too."""
        front = {p for each in self._beside - self._behind for p in each.parameters()}
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
    kind: Any = type(module)
    made = kind.__new__(kind)
    made.__dict__ = {k: copy.copy(v) if isinstance(v, dict) else v for k, v in vars(module).items()}
    config = getattr(module, "config", None)
    if getattr(config, "use_cache", False):
        made.config = copy.copy(config)
        made.config.use_cache = False
    return made


def _check_apart(stages: Sequence[nn.Module]) -> None:
    """Refuse a weight in several stages."""
    home: dict[Tensor, int] = {}
    for stage, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            if home.setdefault(parameter, stage) != stage:
                raise ValueError(
                    f"parameter {name!r} is used in stages {home[parameter]} and {stage}, each of "
                    "which would have a part of its gradient; blocks that share weights must come "
                    "into one stage"
                )
