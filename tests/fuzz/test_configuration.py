"""Every key of the sections that are ours, and ours of other sections, given wrongly.

``RULES`` has for each key what it may be, and what not, in a configuration that is right but for
that key: by the rule of its type, or by hand where other keys bound it.
"""

from __future__ import annotations

import math
from dataclasses import is_dataclass
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchtitan.config import JobConfig as TitanJobConfig

from tests.fuzz.mangling import VALUES, fuzzed, message_of
from tests.timelyfreeze.helpers.rules import Rule, both_sides, rule_of
from tests.torchtitan.helpers.job_configs import config, put
from timelyfreeze.files import OneOf
from timelyfreeze.settings import CacheSettings, ElasticSettings, PackingSettings
from torchtitan.freezing.checks import ConfigError, check
from torchtitan.freezing.values.command_line import form_errors
from torchtitan.freezing.values.freezing import freeze_settings
from torchtitan.freezing.values.rules import _RULES
from torchtitan.settings import with_values
from torchtitan.settings.job_config import JobConfig, job_config_class

CLASS = job_config_class()
NAN, INF = math.nan, math.inf


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


def _of_type(rule: Rule, hint: Any) -> Any:
    if isinstance(rule, OneOf):
        return _word(*rule._words)
    (least, *most), wrong = both_sides(rule)
    if "float" not in str(hint):
        return _whole(math.ceil(least), *most)
    right = st.floats(least, most[0] if most else 1e6)
    return _number(right, *wrong, below=least, above=most[0] if most else None)


def _keys(section: Any, prefix: str = "") -> dict[str, Any]:
    """The type of each key."""
    found = {}
    for name, hint in get_type_hints(section, include_extras=True).items():
        is_section = is_dataclass(hint)
        found |= _keys(hint, f"{prefix}{name}.") if is_section else {f"{prefix}{name}": hint}
    return found


def _own_keys() -> dict[str, Any]:
    """The type of each key of our sections, and of ours in upstream's."""
    found, others = _keys(CLASS), (*_keys(TitanJobConfig), "plots.", "report.")
    return {key: hint for key, hint in found.items() if not key.startswith(others)}


FLAG = (st.booleans(), st.nothing())
PATH = (st.text(max_size=9), st.nothing())  # read only if another key asks for it
SHARE = _number(st.floats(0, 1), below=0.0, above=1.0)
COLORS = st.lists(st.floats(0.01, 1), min_size=3, max_size=3)
WRONG_COLORS = st.lists(st.floats(0.01, 1), max_size=2) | st.just([0.5, INF, 0.5])
METHODS = ("apf", "autofreeze", "egeria", "fixed", "linear", "lisa", "pipetransformer", "smartpipe")
# Steps: 1000 of training, and T_w, T_m, T_f as they are by default, 60, 100 and 200.
BY_HAND: dict[str, tuple[Any, Any]] = {
    "freezing.method": _word(
        "none", "timelyfreeze", "lora", *METHODS, *(f"timelyfreeze+{name}" for name in METHODS)
    ),
    "freezing.preset": _word("", "paper"),
    "freezing.last_warmup_step": _whole(0, 94),  # 3 batches in each half of monitoring
    "freezing.last_monitor_step": _whole(66, 199),
    "freezing.last_ramp_step": _whole(101),
    "freezing.max_freeze_ratio": (
        st.floats(0, 1) | st.lists(st.floats(0, 1), min_size=4, max_size=4),
        SHARE[1]
        | st.lists(st.floats(0, 1), max_size=3)
        | st.lists(SHARE[1], min_size=4, max_size=4),
    ),
    "freezing.gradient_rank": _whole(0),
    "freezing.discard_batches": _whole(0, 19),
    "freezing.solver_time_limit_s": _number(
        st.floats(1e-3, 99.9), 0.0, 100.0, INF, -INF, below=0.0, above=100.0
    ),
    "freezing.solver_delay_steps": _whole(0, 99),
    "freezing.control_every": (
        st.just(0) | st.integers(3, 10**6),
        st.integers(1, 2) | st.integers(-(10**6), -1),
    ),
    "freezing.egeria.unfreeze_steps": (
        st.lists(st.integers(1), max_size=3),
        st.lists(st.integers(max_value=0), min_size=1, max_size=3),
    ),
    "freezing.egeria.modules": (
        st.lists(st.sampled_from(["layers", r"\.[01]\."])),
        st.sampled_from([["("], ["layers", "[a"]]),
    ),
    "freezing.egeria.max_cpu_load": _number(st.floats(1e-6, 1e6), 0.0, below=0.0),
    "freezing.fixed.layers": _whole(0, 6),
    "freezing.fixed.names": (
        st.lists(st.sampled_from(["embed", "layers.0-1", "*.norm"])),
        st.lists(st.sampled_from(["layers.9", "1-0", ""]), min_size=1),
    ),
    "freezing.linear.max_layers": _whole(0, 6),
    "freezing.lisa.active_layers": _whole(0, 6),
    # Of both rooms one has to be there.
    "freezing.cache.memory_gib": _number(st.floats(1e-6, 1e6), 0.0, INF, -INF, below=0.0),
    "freezing.cache.folder": PATH,
    "freezing.elastic.join_limit_s": _number(
        st.floats(1e-6, 299.9), 0.0, 300.0, INF, below=0.0, above=300.0
    ),
    # A step has 8 rows.
    "freezing.packing.max_global_batch": (
        st.just(0) | st.integers(8),
        st.integers(max_value=-1) | st.integers(1, 7),
    ),
    "lora.targets": (
        st.lists(st.sampled_from(["wq", "attention.wo", "w2"]), max_size=3),
        st.sampled_from([["query"], ["wq", "w"]]),
    ),
    # Of 1,000 steps 100 have to follow, up to the end of monitoring.
    "lora.until": (st.integers(0, 899), st.integers(max_value=-1) | st.integers(900)),
    "data.chat_template": _word(
        "auto", "plain", "alpaca", "llama2", "llama3", "chatml", "tokenizer"
    ),
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
    **{key: PATH for key in _keys(CLASS) if key.startswith("data.columns.")},
    **{
        f"vision.{name}": PATH
        for name in ("image_column", "label_column", "subset", "split", "validation_split")
    },
    "vision.mean": (COLORS, WRONG_COLORS),
    "vision.std": (COLORS, WRONG_COLORS | st.just([0.5, 0.0, 0.5])),
    "parallelism.partition": _word("", "time", "parameters", "memory"),
    "parallelism.partition_profile": PATH,
}
OWN = _own_keys()
BY_TYPE = {key: _of_type(rule, hint) for key, hint in OWN.items() if (rule := rule_of(hint))}
BY_KEY = {key: _of_type(rule, OWN[key]) for key, rule in _RULES if key in OWN}
FLAGS = {key: FLAG for key, hint in OWN.items() if hint is bool}
RULES: dict[str, tuple[Any, Any]] = {**BY_TYPE, **BY_KEY, **FLAGS, **BY_HAND}
KEYS = sorted(RULES)


def test_every_key_has_a_rule() -> None:
    assert set(OWN) == set(RULES)


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
