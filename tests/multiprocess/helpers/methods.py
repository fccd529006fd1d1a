"""The freezing methods that the tests of this folder run, one row each.

A new method is one more row. Settings are such that it freezes something, but not everything,
within a few steps of the small model.
"""

from dataclasses import dataclass, field

# Steps 1-2 are warm-up; for methods with a plan 3-4 upper bound, 5-6 lower bound, 7-9 ramp.
PHASES = {
    "freezing__last_warmup_step": 2,
    "freezing__last_monitor_step": 6,
    "freezing__last_ramp_step": 9,
    "freezing__discard_batches": 1,
}
STEPS = 13


@dataclass(frozen=True)
class Row:
    """A method under test.

    Attributes:
        method: The value of ``freezing.method``.
        settings: What is set besides.
        monotone: Whether what is frozen once stays frozen.
        prefix: Whether what is frozen is the front of the model.
        module: File in ``imported`` to import first, which registers the method.
    """

    method: str
    settings: dict = field(default_factory=dict)
    monotone: bool = False
    prefix: bool = False
    module: str | None = None

    @property
    def plans(self):
        return self.method.startswith("timelyfreeze")

    @property
    def arguments(self):
        return {"freezing__method": self.method, **PHASES, **self.settings}


APF = {
    "freezing__apf__check_interval": 2,
    "freezing__apf__alpha": 0.5,
    "freezing__apf__threshold": 0.95,
}
AUTOFREEZE = {"freezing__autofreeze__check_interval": 2, "freezing__autofreeze__percentile": 90}
ROWS = [
    Row("timelyfreeze"),
    Row("apf", {**APF, "freezing__apf__freezing_period": "grow_and_halve"}),
    Row("autofreeze", AUTOFREEZE, monotone=True, prefix=True),
    Row("timelyfreeze+apf", {**APF, "freezing__score_dtype": "bfloat16"}),
    Row("timelyfreeze+autofreeze", {**AUTOFREEZE, "freezing__score_memory": "host"}),
    Row(
        "pipetransformer",
        {"freezing__pipetransformer__check_interval": 2, "freezing__pipetransformer__alpha": 0.4},
        monotone=True,
        prefix=True,
    ),
    Row(
        "smartpipe",
        {
            "freezing__smartpipe__check_interval": 2,
            "freezing__smartpipe__tau": 1.5,
            "freezing__smartpipe__rate": 0.4,
        },
        monotone=True,
        prefix=True,
    ),
    Row(
        "egeria",
        {
            "freezing__egeria__check_interval": 1,
            "freezing__egeria__window": 2,
            "freezing__egeria__stale": 1,
            "freezing__egeria__tolerance": 10.0,
            "freezing__egeria__unfreeze_at": 0.0,  # the learning rate falls within few steps
            "freezing__egeria__bootstrap_change": 10.0,
            # What arrives when would differ from run to run.
            "freezing__egeria__reference": "inline",
        },
        monotone=True,
        prefix=True,
    ),
    Row("fixed", {"freezing__fixed__layers": 3}, monotone=True, prefix=True),
    Row("timelyfreeze+fixed", {"freezing__fixed__names": "embed,layers.1-2,*_norm"}),
    Row("linear", {"freezing__linear__check_interval": 2}, monotone=True, prefix=True),
    Row("lisa", {"freezing__lisa__check_interval": 3}),
    # Registered by a test's file: a method needs no edit anywhere else.
    Row("every_other", module="every_other_policy"),
]
ROW = {row.method: row for row in ROWS}
