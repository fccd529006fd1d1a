"""A pipeline whose ranks take turns on one device."""

from timelyfreeze.emulation.controller import (
    EmulatedBatch,
    EmulatedRecorder,
    EmulatedState,
    merge_ranks,
)
