"""Upstream's checkpoint manager, for interrupted jobs resumed in another size.

Additions: unfinished checkpoints, and those of the model alone, are never resumed; damaged or
foreign checkpoints are named with advice; a checkpoint being overwritten counts as unfinished;
saving works at any step; the run's configuration is saved; and states of processes can be read by
more processes or fewer. ``docs/upstream.md`` has upstream's behaviour.
"""

import errno
import os
import shutil
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torchtitan.components.checkpoint import MODEL, OPTIMIZER, CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger

from torchtitan.checkpoints.contents import cause_of
from torchtitan.checkpoints.finished import (
    METADATA,
    all_steps,
    changed_settings,
    finished_steps,
    model_only_error,
    resumable_step,
    save_settings,
    saved_keys,
)
from torchtitan.checkpoints.handover import MemoryCheckpoint
from torchtitan.lora.adapters import is_adapter, merged

# A disk with less is full: what could not be written was larger.
_BLOCK = 4096


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message names checkpoint, reason and advice."""


class SafeCheckpointManager(CheckpointManager):
    """Upstream's manager, with the promises of this module; knows the run's ``settings``."""

    settings: Mapping[str, Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saved_step: int | None = None
        self._handed: MemoryCheckpoint | None = None

    def hand_over(
        self, device: torch.device, adapter_scale: float | None = None
    ) -> MemoryCheckpoint:
        """Save everything in memory for :meth:`take_over`; all processes do so together.

        Adapters of a scale are merged into weights, which their optimizer knows nothing of.
        """
        memory = MemoryCheckpoint(device)
        states = self._flattened_model_states_sd()
        if adapter_scale is not None:
            del states[OPTIMIZER]
            states = merged(states, adapter_scale)
        memory.metadata = dcp.save(states, storage_writer=memory)
        return memory

    def take_over(self, memory: MemoryCheckpoint) -> None:
        """Load from memory instead of from a folder when :meth:`load` is called, once."""
        self._handed = memory

    def load(self, step: int = -1) -> bool:
        """Load as upstream does, but take unfinished checkpoints for none.

        Where none is finished, upstream loads nothing at all: training would begin with random
        weights although ``checkpoint.initial_load_path`` or ``initial_load_in_hf`` name others.
        CheckpointError if the checkpoint is damaged or does not fit this run.
        """
        if self._handed is not None:
            memory, self._handed = self._handed, None
            saved = memory.read_metadata().state_dict_metadata
            states = {
                name: state
                for name, state in self._flattened_model_states_sd().items()
                # A state that was left behind begins anew.
                if name not in self.states or any(key.startswith(f"{name}.") for key in saved)
            }
            states = fitted_states(states, saved)
            dcp.load(states, storage_reader=memory)
            self.states[MODEL].load_state_dict(states)
            return True
        if not self.enable:
            return super().load(step)
        folder = Path(self.folder)
        finished = finished_steps(folder)
        unfinished = sorted(all_steps(folder).keys() - finished.keys())
        if unfinished and dist.get_rank() == 0:
            names = ", ".join(f"step-{number}" for number in unfinished)
            logger.warning("%s: %s passed over; writing it was not finished", folder, names)
        if finished and step == -1:
            step = self._last_whole(finished)
        is_new = step == -1
        new_start = Path(self.initial_load_path or "the initial weights")
        start = new_start if is_new else folder / f"step-{step}"
        kept = self.folder
        try:
            if not is_new or (self.initial_load_path and not self.initial_load_model_only):
                self._tell_changes(start)
            if is_new:
                # Where its folder is not there upstream loads what a new run begins with.
                self.folder = os.path.join(kept, "none-is-finished")
            else:
                self._saved_step = step
            return super().load(step)
        except CheckpointException as error:
            raise CheckpointError(
                f"{start} cannot be loaded: {cause_of(error)}; it is damaged, or belongs to "
                "another model or configuration. checkpoint.load_step names an older one, "
                "checkpoint.folder another place; to begin again, move the folder away"
            ) from error
        finally:
            self.folder = kept

    def _last_whole(self, finished: Mapping[int, Path]) -> int:
        """Return the last step with more than the model, and log skipped steps."""
        last, step = max(finished), resumable_step(finished, self.exclude_from_loading)
        if step is None:
            raise CheckpointError(model_only_error(finished[last]))
        if step != last and dist.get_rank() == 0:
            logger.warning(
                "%s holds the model alone; the run goes on from %s", finished[last], finished[step]
            )
        return step

    def _tell_changes(self, checkpoint: Path) -> None:
        if changes := changed_settings(checkpoint, self.settings or {}):
            told = (f"{key} is {now!r} and was {then!r}" for key, (then, now) in changes.items())
            logger.info("The run goes on from %s in another way: %s", checkpoint, ", ".join(told))

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load as upstream, but only the checkpoint's content (:func:`fitted_states`)."""
        if not from_hf:
            state_dict = fitted_states(state_dict, saved_keys(Path(checkpoint_id)))
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)

    def saves_after(self, step: int) -> bool:
        """Return whether a checkpoint is saved after ``step``, the last step or another."""
        return bool(self._should_save(step))

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save as upstream; CheckpointError for a failure, with earlier checkpoints intact."""
        if not self._should_save(curr_step, last_step):
            super().save(curr_step, last_step)
            return
        folder = Path(self._create_checkpoint_id(curr_step))
        try:
            if dist.get_rank() == 0:
                # What was saved here before is whole no more once its files are written over. No
                # rank writes before rank 0 has agreed to the plan of what goes where.
                (folder / METADATA).unlink(missing_ok=True)
                if self.settings is not None:
                    save_settings(folder, self.settings)
            super().save(curr_step, last_step)
        except (CheckpointException, OSError) as error:
            cause = cause_of(error)
            if "Errno" not in cause and shutil.disk_usage(self.folder).free < _BLOCK:
                # torch tells of its file, and another rank cannot tell what it came from.
                cause = f"{os.strerror(errno.ENOSPC)} ({cause})"
            raise CheckpointError(
                f"{folder} cannot be written: {cause}; make room there; {self.last_finished()}"
            ) from error
        self._saved_step = curr_step

    def _purge_stale_checkpoints(self) -> None:
        """Remove checkpoints beyond ``checkpoint.keep_latest_k``.

        Upstream takes everything with "step-" and a number in its name for a checkpoint.
        """
        if self.keep_latest_k > 0 and dist.get_rank() == 0:
            for _, old in sorted(all_steps(Path(self.folder)).items())[: -self.keep_latest_k]:
                self.purge_queue.put(str(old))

    def last_finished(self) -> str:
        """Log the checkpoint for a resume."""
        finished = finished_steps(Path(self.folder))
        if not finished:
            return f"{self.folder} has no finished checkpoint"
        step = resumable_step(finished, self.exclude_from_loading)
        if step is None:
            return f"{finished[max(finished)]} holds the model alone"
        return f"the same command resumes from {finished[step]}"

    def save_now(self, step: int, *, last_step: bool) -> str:
        """Save at the last finished step, unless saved; log the result.

        Where training ends for good here, ``checkpoint.last_save_*`` apply; otherwise all state for
        a resume is saved.
        """
        if not self.enable:
            return "; nothing is saved, since checkpoint.enable is false"
        if self.load_only:
            return "; nothing is saved, since checkpoint.load_only is true"
        if step == 0:
            return "; there is nothing to save"
        if self._saved_step == step and not last_step:
            return "; the same command goes on from there"
        should_save = self._should_save
        self._should_save = lambda *args: True  # type: ignore[method-assign]
        try:
            self.save(step, last_step)
            self._async_wait()
        finally:
            self._should_save = should_save  # type: ignore[method-assign]
        return "; its checkpoint is saved" + (
            "" if last_step else ", and the same command goes on from there"
        )


_STATE = "state."


def _fitted_optimizers(optimizers: OptimizersContainer[Any], keys: Collection[str]) -> Any:
    """Return optimizers with zeros for tensors never updated, as before the first update."""
    every = optimizers.state_dict()
    without = {k: v for k, v in every.items() if k.startswith(_STATE) and k not in keys}

    def load(state_dict: Mapping[str, Any]) -> None:
        for key, value in without.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"the checkpoint has no optimizer.{key}, which is no tensor")
            value.zero_()
        if without:
            logger.info(
                "%d tensors of the optimizers' state are not in the checkpoint, since what they "
                "belong to was never updated: they begin with zeros",
                len(without),
            )
        optimizers.load_state_dict({**state_dict, **without})

    held = {key: value for key, value in every.items() if key not in without}
    return SimpleNamespace(state_dict=lambda: held, load_state_dict=load)


def fitted_states(states: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return states restricted to a checkpoint's content, the full names ``keys``."""

    def of(name: str) -> list[str]:
        return [key.removeprefix(f"{name}.") for key in keys if key.startswith(f"{name}.")]

    known = frozenset(keys)
    new = [name for name in states if is_adapter(name) and name not in known]
    if new:
        logger.info("The checkpoint has no adapters: %d tensors of them begin again", len(new))
    fitted = {name: state for name, state in states.items() if name not in new}
    for name, state in fitted.items():
        if hasattr(state, "state_to_load"):  # processes save parts of their own
            fitted[name] = SimpleNamespace(
                state_dict=partial(state.state_to_load, of(name)),
                load_state_dict=state.load_state_dict,
            )
        elif name == OPTIMIZER and isinstance(state, OptimizersContainer):
            held = of(name)
            # Without any state it is a checkpoint of something else, which torch tells.
            if any(key.startswith(_STATE) for key in held):
                fitted[name] = _fitted_optimizers(state, held)
    return fitted
