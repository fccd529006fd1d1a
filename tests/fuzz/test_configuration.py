"""Every key of the sections that are ours, and ours of other sections, given wrongly.

``RULES`` is the table of docs/configuration.md once more: for each key what it may be,
and what not, in a configuration that is right but for that key.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.mangling import VALUES, fuzzed, message_of
from tests.torchtitan.helpers.job_configs import config, put
from timelyfreeze.settings import CacheSettings, ElasticSettings, PackingSettings
from torchtitan.freezing.checks import ConfigError, check
from torchtitan.freezing.values.command_line import form_errors
from torchtitan.freezing.values.freezing import freeze_settings
from torchtitan.settings import with_values
from torchtitan.settings.job_config import JobConfig, job_config_class

ROOT = Path(__file__).resolve().parents[2]
CLASS = job_config_class()
NAN, INF = math.nan, math.inf
HUGE = 2**64


def _whole(least: int, most: int | None = None) -> tuple[Any, Any]:
    """Whole numbers in [least, most], and other ones."""
    wrong = st.integers(max_value=least - 1)
    right = st.integers(least, most)
    return right, wrong if most is None else wrong | st.integers(min_value=most + 1)


def _number(
    right: Any, *wrong: float, below: float | None = None, above: float | None = None
) -> Any:
    """Numbers drawn from ``right``; wrong ones, and all below or above an excluded limit."""
    others = st.sampled_from([NAN, *wrong])
    if below is not None:
        others |= st.floats(max_value=below, exclude_max=True, allow_nan=False)
    if above is not None:
        others |= st.floats(min_value=above, exclude_min=True, allow_nan=False)
    return right, others


def _word(*known: str) -> Any:
    return st.sampled_from(known), st.text(max_size=9).filter(lambda word: word not in known)


FLAG = (st.booleans(), st.nothing())
PATH = (st.text(max_size=9), st.nothing())  # read only if another key asks for it
SHARE = _number(st.floats(0, 1), below=0.0, above=1.0)
COLORS = st.lists(st.floats(0.01, 1), min_size=3, max_size=3)
WRONG_COLORS = st.lists(st.floats(0.01, 1), max_size=2) | st.just([0.5, INF, 0.5])
METHODS = ("apf", "autofreeze", "egeria", "fixed", "linear", "lisa", "pipetransformer", "smartpipe")
# Steps: 1000 of training, and T_w, T_m, T_f as they are by default, 60, 100 and 200.
RULES: dict[str, tuple[Any, Any]] = {
    "freezing.method": _word(
        "none", "timelyfreeze", "lora", *METHODS, *(f"timelyfreeze+{name}" for name in METHODS)
    ),
    "freezing.preset": _word("", "paper"),
    "freezing.last_warmup_step": _whole(0, 94),  # 3 batches in each half of monitoring
    "freezing.last_monitor_step": _whole(66, 199),
    "freezing.monitoring": _word("halves", "mixed"),
    "freezing.last_ramp_step": _whole(101),
    "freezing.max_freeze_ratio": (
        st.floats(0, 1) | st.lists(st.floats(0, 1), min_size=4, max_size=4),
        SHARE[1]
        | st.lists(st.floats(0, 1), max_size=3)
        | st.lists(SHARE[1], min_size=4, max_size=4),
    ),
    "freezing.gradient_rank": _whole(0),
    # Alone, without directions, none has a rate.
    "freezing.seed": _whole(0, HUGE - 1),
    "freezing.first_stage": _word("all_or_nothing", "per_tensor"),
    "freezing.skip_input_grads": _word("off", "use"),
    "freezing.discard_batches": _whole(0, 19),
    "freezing.solver_time_limit_s": _number(
        st.floats(1e-3, 99.9), 0.0, 100.0, INF, -INF, below=0.0, above=100.0
    ),
    "freezing.solver_delay_steps": _whole(0, 99),
    "freezing.replan_every": _whole(0),
    "freezing.control_every": (
        st.just(0) | st.integers(3, 10**6),
        st.integers(1, 2) | st.integers(-(10**6), -1),
    ),
    "freezing.replan_threshold": _number(st.floats(1e-6, 1e6), 0.0, INF, -INF, below=0.0),
    "freezing.min_gain": _number(st.floats(-1, 1e6), INF, -INF, below=-1.0),
    "freezing.score_memory": _word("device", "host"),
    "freezing.score_dtype": _word("float32", "bfloat16"),
    "freezing.apf.check_interval": _whole(1),
    "freezing.apf.threshold": SHARE,
    "freezing.apf.alpha": _number(st.floats(0, 1, exclude_max=True), 1.0, below=0.0, above=1.0),
    "freezing.apf.reduction": _word("elements", "share", "sums"),
    "freezing.apf.freezing_period": _word("until_unstable", "grow_and_halve"),
    "freezing.autofreeze.check_interval": _whole(1),
    "freezing.autofreeze.checks_per_epoch": _whole(0),
    "freezing.autofreeze.percentile": _number(st.floats(0, 100), below=0.0, above=100.0),
    "freezing.autofreeze.delta": _word("gradients", "updates"),
    "freezing.autofreeze.change": _word("absolute", "signed"),
    "freezing.egeria.check_interval": _whole(1),
    "freezing.egeria.window": _whole(2),
    "freezing.egeria.stale": _whole(1),
    "freezing.egeria.tolerance": _number(st.floats(1e-6, 1e6), 0.0, INF, below=0.0),
    "freezing.egeria.bootstrap_change": _number(st.floats(1e-6, 1e6), 0.0, INF, below=0.0),
    "freezing.egeria.unfreeze_at": _number(
        st.floats(0, 1, exclude_max=True), 1.0, below=0.0, above=1.0
    ),
    "freezing.egeria.unfreeze_steps": (
        st.lists(st.integers(1), max_size=3),
        st.lists(st.integers(max_value=0), min_size=1, max_size=3),
    ),
    "freezing.egeria.modules": (
        st.lists(st.sampled_from(["layers", r"\.[01]\."])),
        st.sampled_from([["("], ["layers", "[a"]]),
    ),
    "freezing.egeria.rows": _word("norm", "square"),
    "freezing.egeria.max_tokens": _whole(0),
    "freezing.egeria.reference": _word("background", "inline"),
    "freezing.egeria.precision": _word("int8", "float32"),
    "freezing.egeria.queue_length": _whole(1),
    "freezing.egeria.max_cpu_load": _number(st.floats(1e-6, 1e6), 0.0, below=0.0),
    "freezing.fixed.layers": _whole(0, 6),
    "freezing.fixed.names": (
        st.lists(st.sampled_from(["embed", "layers.0-1", "*.norm"])),
        st.lists(st.sampled_from(["layers.9", "1-0", ""]), min_size=1),
    ),
    "freezing.linear.check_interval": _whole(1),
    "freezing.linear.layers_per_check": _whole(1),
    "freezing.linear.max_layers": _whole(0, 6),
    "freezing.lisa.check_interval": _whole(1),
    "freezing.lisa.active_layers": _whole(0, 6),
    "freezing.pipetransformer.check_interval": _whole(1),
    "freezing.pipetransformer.alpha": _number(
        st.floats(1e-6, 1, exclude_max=True), 0.0, 1.0, below=0.0, above=1.0
    ),
    "freezing.smartpipe.check_interval": _whole(1),
    "freezing.smartpipe.tau": _number(st.floats(1e-6, 1e6), 0.0, INF, below=0.0),
    "freezing.smartpipe.rate": _number(st.floats(1e-6, 1), 0.0, below=0.0, above=1.0),
    "freezing.run_ahead": FLAG,
    "freezing.cache.enable": FLAG,
    "freezing.cache.memory_gib": _number(st.floats(1e-6, 1e6), 0.0, INF, -INF, below=0.0),
    "freezing.cache.disk_gib": _number(st.floats(0, 1e6), INF, -INF, below=0.0),
    "freezing.cache.folder": PATH,
    "freezing.elastic.enable": FLAG,
    "freezing.elastic.partition": _word("parameters", "time"),
    "freezing.elastic.frozen_cost": SHARE,
    "freezing.elastic.sublayers": FLAG,
    "freezing.elastic.min_ranks": _whole(1),
    "freezing.elastic.global_batch": _word("constant", "paper"),
    "freezing.elastic.search_microbatches": FLAG,
    "freezing.elastic.join_limit_s": _number(
        st.floats(1e-6, 299.9), 0.0, 300.0, INF, below=0.0, above=300.0
    ),
    "freezing.packing.mode": _word("none", "performance", "efficiency"),
    # A step has 8 rows.
    "freezing.packing.max_global_batch": (
        st.just(0) | st.integers(8),
        st.integers(max_value=-1) | st.integers(1, 7),
    ),
    "freezing.packing.learning_rate": _word("none", "linear", "sqrt"),
    "lora.rank": _whole(1),
    "lora.alpha": _number(st.floats(1e-6, 1e6), 0.0, INF, below=0.0),
    "lora.targets": (
        st.lists(st.sampled_from(["wq", "attention.wo", "w2"]), max_size=3),
        st.sampled_from([["query"], ["wq", "w"]]),
    ),
    "lora.learning_rate": _number(st.floats(1e-6, 1e6), 0.0, INF, below=0.0),
    # Of 1,000 steps 100 have to follow, up to the end of monitoring.
    "lora.until": (st.integers(0, 899), st.integers(max_value=-1) | st.integers(900)),
    "data.shuffle": FLAG,
    "data.seed": _whole(0),
    "data.validation_fraction": _number(
        st.floats(0, 1, exclude_max=True), 1.0, below=0.0, above=1.0
    ),
    "data.chat_template": _word(
        "auto", "plain", "alpaca", "llama2", "llama3", "chatml", "tokenizer"
    ),
    "data.packing": FLAG,
    "data.all_logits": FLAG,
    # Training reads one place by default.
    "data.paths": (
        st.lists(st.text(min_size=1, max_size=9), max_size=3, unique=True),
        st.just(["x", "x"]) | st.just(["x", ""]),
    ),
    "data.weights": (
        st.lists(st.floats(1e-6, 1000), max_size=1),
        st.lists(st.sampled_from([0.0, -1.0, INF, 1001.0]), min_size=1, max_size=1)
        | st.lists(st.floats(1e-6, 1000), min_size=2, max_size=3),
    ),
    **dict.fromkeys(
        ("data.subset", "data.split", "data.revision"),
        (
            st.text(max_size=9) | st.lists(st.text(max_size=9), max_size=1),
            st.lists(st.text(max_size=9), min_size=2, max_size=3),
        ),
    ),
    **{
        f"data.columns.{name}": PATH
        for name in (
            *("messages", "conversations", "tools", "prompt", "completion"),
            *("instruction", "input", "output"),
        )
    },
    "vision.image_size": _whole(1),
    "vision.image_column": PATH,
    "vision.label_column": PATH,
    "vision.subset": PATH,
    "vision.split": PATH,
    "vision.validation_split": PATH,
    "vision.classes": _whole(0),
    "vision.augmentation": _word("resized_crop", "padded_crop", "none"),
    "vision.mean": (COLORS, WRONG_COLORS),
    "vision.std": (COLORS, WRONG_COLORS | st.just([0.5, 0.0, 0.5])),
    "vision.mixup": _number(st.floats(0, 1e6), INF, below=0.0),
    "vision.label_smoothing": _number(st.floats(0, 1, exclude_max=True), 1.0, below=0.0, above=1.0),
    "emulation.enable": FLAG,
    "parallelism.partition": _word("", "time", "parameters", "memory"),
    "parallelism.partition_profile": PATH,
    "model.vocab_size": _whole(1),
    "model.rope_scaling_factor": _number(st.floats(1e-3, 1e6), 0.0, INF, below=0.0),
    "model.rope_low_freq_factor": _number(st.floats(1e-3, 1e6), 0.0, INF, below=0.0),
    "model.rope_high_freq_factor": _number(st.floats(1e-3, 1e6), 0.0, INF, below=0.0),
    "model.rope_original_max_position_embeddings": _whole(1),
}
KEYS = sorted(RULES)


def _told(key: str, value: Any) -> str:
    """Return what is said of a configuration that has ``value`` under ``key``, "" if nothing."""
    section, _, name = key.rpartition(".")
    table: dict[str, Any] = {name: value}
    for part in reversed(section.split(".")):
        table = {part: table}
    if found := list(form_errors(CLASS, table)):
        return "\n".join(found)
    job_config = config(training__dataset="alpaca")
    switched_on = {
        "freezing.cache": CacheSettings(enable=True),
        "freezing.elastic": ElasticSettings(enable=True),
        "freezing.packing": PackingSettings("performance"),
    }
    if section in switched_on:
        put(job_config, "freezing", method="fixed")
        put(job_config, "freezing", **{section.removeprefix("freezing."): switched_on[section]})
    job_config.checkpoint.enable = True
    if section == "lora" and name != "until":
        put(job_config, "freezing", method="lora")
    if key == "freezing.run_ahead":
        put(job_config, "freezing", method="fixed")
    job_config = with_values(job_config, {f"{section}.{name}": value})
    policy = section.removeprefix("freezing.")
    if policy in METHODS:
        put(job_config, "freezing", method=f"timelyfreeze+{policy}")
    return message_of(lambda: _use(job_config), refusals=(ConfigError,)) or ""


def _use(job_config: JobConfig) -> None:
    check(job_config)
    freeze_settings(job_config.freezing)


def _keys(section: type, prefix: str) -> set[str]:
    return {
        name
        for field in fields(section)
        for name in (
            _keys(field.type, f"{prefix}{field.name}.")
            if is_dataclass(field.type)
            else {f"{prefix}{field.name}"}
        )
    }


def test_every_key_has_a_rule() -> None:
    sections = {field.name: field.type for field in fields(CLASS)}
    keys = {
        key
        for name in ("freezing", "lora", "data", "vision", "emulation")
        for key in _keys(sections[name], f"{name}.")
    }
    for name in ("model", "parallelism"):
        upstream = {field.name for field in fields(sections[name].__mro__[1])}
        keys |= {
            f"{name}.{field.name}" for field in fields(sections[name]) if field.name not in upstream
        }
    assert keys == set(RULES)


@pytest.mark.parametrize("key", [key for key in KEYS if RULES[key] not in (FLAG, PATH)])
@fuzzed(10)
@given(data=st.data())
def test_what_breaks_the_rule_of_a_key_is_told_with_key_and_value(
    data: st.DataObject, key: str
) -> None:
    value = data.draw(RULES[key][1])
    told = _told(key, value)
    assert any(f"{key}{link}" in told for link in (" is ", " has ", " (", "["))
    if not isinstance(value, list):
        assert repr(value) in told or str(value) in told


@pytest.mark.parametrize("key", KEYS)
@fuzzed(10)
@given(data=st.data())
def test_what_keeps_to_the_rule_of_a_key_is_taken(data: st.DataObject, key: str) -> None:
    value = data.draw(RULES[key][0])
    told = _told(key, value)
    # Some are right by themselves and clash with another key, which is then named as well.
    clashes = (
        *("needs", "is not installed", "emulation.enable is true, and"),
        *("model.name", "template", "per_tensor", "makes one module of the model"),
        "it must be exactly one",
    )
    assert not told or any(clash in told for clash in clashes), (key, value, told)


@fuzzed(100)
@given(key=st.sampled_from(KEYS), value=VALUES.filter(lambda value: value is not None))
def test_a_value_of_any_type_is_taken_or_told(key: str, value: Any) -> None:
    told = _told(key, value)
    has_package = "the package peft is not installed" not in told  # in a newcomer's environment
    assert not told or key in told or not has_package
    if not told:
        kinds = {type(one) for one in (value if isinstance(value, list) else [value])}
        assert not kinds & {dict, type(None)}
        assert (bool in kinds) == (RULES[key] is FLAG)
