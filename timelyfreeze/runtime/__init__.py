"""The backward that skips work; torch's private names stand in ``torch_pipelining``."""

from timelyfreeze.runtime import torch_releases as torch_releases  # isort: split

from timelyfreeze.runtime.adoption import adopt_stages
from timelyfreeze.runtime.entering.ahead import FrontRunAhead
from timelyfreeze.runtime.entering.stage import BatchEntry, BlockPlace
from timelyfreeze.runtime.exchange import Exchange, exchange_of, measure_transfers, together
from timelyfreeze.runtime.parts import Masks, ObservedBatch, StepPart
from timelyfreeze.runtime.recorder import ActionRecorder, Clock, OutsideClock, clock_for
from timelyfreeze.runtime.stage import NOTHING_FROZEN, FreezingStage
from timelyfreeze.runtime.torch_pipelining import (
    forward_only,
    has_loss,
    named_order,
    places_stages_in_v,
    read_order,
    run_batches_in,
    run_in_order,
    split_batch,
    stages_of,
)
