"""What a LLaMA, Mistral, Qwen2 or Qwen3 model is made of, in the words of ``config.json``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from timelyfreeze.files import read_object, shown

CONFIG_FILE = "config.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
# What transformers takes where config.json has no such key.
_DEFAULTS = {"model_type": "llama", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
_DEFAULTS_OF = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
MODEL_TYPES = tuple(_DEFAULTS_OF)
_DEFAULT_WINDOW = 4096
# Neither changes what the weights mean: the length is a limit for training.seq_len, and tied
# embeddings are untied when they are loaded.
_NO_KEYS = ("qkv_bias", "output_bias", "qk_norm")
_NOT_COMPARED = ("max_position_embeddings", "tie_word_embeddings")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of long wavelengths in the rotary embeddings."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of a LLaMA, or of a model of another family that is built like one.

    The names are those of ``config.json``, where it has the value. ``rope_scaling`` is None for
    rotary embeddings that are not scaled, which a factor of 1 means too. ``output_bias`` is of the
    projection behind the attention, ``qk_norm`` head by head. A token sees ``sliding_window``
    tokens, itself included; None for all before it.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    model_type: str = "llama"
    head_dim: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        """Fill in the width of a head."""
        if self.head_dim is None:
            width = self.hidden_size // self.num_attention_heads
            object.__setattr__(self, "head_dim", width)


def read_settings(folder: Path) -> dict[str, Any]:
    """Return what ``config.json`` of ``folder`` says; ValueError if it is no JSON object."""
    path = folder / CONFIG_FILE
    try:
        return read_object(path)
    except FileNotFoundError:
        raise ValueError(f"{str(folder)!r} has no {CONFIG_FILE}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error


def parse_config(settings: Mapping[str, Any]) -> LlamaConfig:
    """Return the model that ``settings``, the contents of a ``config.json``, describe.

    Both forms of the rotary embeddings are understood: ``rope_parameters`` of transformers 5, and
    ``rope_theta`` beside ``rope_scaling`` of the releases before. ValueError names everything for
    which the model has no place.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    family = given.get("model_type", "llama")
    # An odd value may be of any type.
    defaults = _DEFAULTS_OF[family] if family in MODEL_TYPES else _DEFAULTS_OF["llama"]
    n_heads = given.get("num_attention_heads")
    given = {**_DEFAULTS, "num_key_value_heads": n_heads, **defaults, **given}
    if problems := list(_unsupported(given)):
        raise ValueError("; ".join(problems))
    rope = _rope_settings(given)
    scaled = rope["rope_type"] == "llama3" and float(rope["factor"]) != 1.0
    scaling = {field.name: float(rope[field.name]) for field in fields(RopeScaling) if scaled}
    if scaled:
        scaling["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    return LlamaConfig(
        **{key: given[key] for key in (*_SIZES, "num_key_value_heads")},
        rms_norm_eps=float(given["rms_norm_eps"]),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=RopeScaling(**scaling) if scaled else None,
        max_position_embeddings=int(given["max_position_embeddings"]),
        tie_word_embeddings=bool(given.get("tie_word_embeddings", False)),
        model_type=family,
        head_dim=given.get("head_dim"),
        qkv_bias=family == "qwen2" or _has_attention_bias(given),
        output_bias=_has_attention_bias(given),
        qk_norm=family == "qwen3",
        sliding_window=_sliding_window(given, settings),
    )


def _has_attention_bias(given: Mapping[str, Any]) -> bool:
    # The other families do not know the key.
    return given["model_type"] in ("llama", "qwen3") and bool(given.get("attention_bias"))


def _sliding_window(given: Mapping[str, Any], settings: Mapping[str, Any]) -> int | None:
    """Return the window of the layers that have one, or None."""
    family = given["model_type"]
    if family == "llama" or (family != "mistral" and not given.get("use_sliding_window")):
        return None
    if family != "mistral":
        layers = given.get("layer_types")
        if layers is None:
            begins = given.get("max_window_layers", 28)
            has_window = begins < given["num_hidden_layers"]
        else:
            has_window = "sliding_attention" in layers
        if not has_window:
            return None
    # Null is none, and no such key is the default.
    return settings.get("sliding_window", _DEFAULT_WINDOW)


def _rope_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_theta, rope_type and the scaling's keys in one, as transformers 5 has them."""
    named = given.get("rope_parameters") or given.get("rope_scaling") or {}
    rope = {key: value for key, value in named.items() if value is not None}
    rope.setdefault("rope_theta", given["rope_theta"])
    return {"rope_type": rope.get("type", "default"), **rope}


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


_WHOLE, _ROPES = "a whole number, 1 or more", ("rope_parameters", "rope_scaling")
# For keys that are there, and sizes: what a value has to fulfil, and that in words.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_SIZES, (lambda value: type(value) is int and 1 <= value < 2**31, _WHOLE)),
    "rms_norm_eps": (_is_positive, "a number above 0"),
    "max_position_embeddings": (_is_positive, "a number above 0"),
    "hidden_act": (lambda value: value == "silu", '"silu"'),
    "sliding_window": (lambda value: type(value) is int and value >= 1, _WHOLE),
    "max_window_layers": (
        lambda value: type(value) is int and value >= 0,
        "a whole number, 0 or more",
    ),
    "layer_types": (lambda value: isinstance(value, list), "a list"),
    **dict.fromkeys(_ROPES, (lambda value: isinstance(value or {}, dict), "an object")),
}


def _unsupported(given: Mapping[str, Any]) -> Iterator[str]:
    asked = {key: given.get(key) for key in _RULES if key in given or key in _SIZES}
    wrong = [key for key, value in asked.items() if not _RULES[key][0](value)]
    for key in wrong:
        yield f"{key} is {shown(asked[key])}; it must be {_RULES[key][1]}"
    if given["model_type"] not in MODEL_TYPES:
        yield f"model_type is {shown(given['model_type'])}; known: {', '.join(MODEL_TYPES)}"
    if given.get("mlp_bias"):
        yield "mlp_bias is true; upstream's feed-forward has no biases, so it must be false"
    if given.get("quantization_config"):
        yield "quantization_config is set; only weights that are not quantized can be trained"
    if set(wrong) & set(_ROPES):
        return
    rope, leads = _rope_settings(given), {"rope_theta": ""}
    if rope["rope_type"] == "llama3":
        leads |= {field.name: 'rope_type is "llama3" and its ' for field in fields(RopeScaling)}
    elif rope["rope_type"] != "default":
        yield f'rope_type is {shown(rope["rope_type"])}; it must be "default" or "llama3"'
    for key, lead in leads.items():
        if not _is_positive(rope.get(key)):
            yield f"{lead}{key} is {shown(rope.get(key))}; it must be a number above 0"
    if set(wrong) & set(_SIZES):
        return
    heads, n_kv_heads = given["num_attention_heads"], given["num_key_value_heads"]
    width = given.get("head_dim")
    if width is None and given["hidden_size"] % heads:
        yield f"num_attention_heads is {heads}; it must divide hidden_size, or head_dim must be set"
    elif width is not None and (type(width) is not int or width < 2 or width % 2):
        yield f"head_dim is {shown(width)}; it must be an even number, 2 or more"
    if type(n_kv_heads) is not int or n_kv_heads < 1 or heads % n_kv_heads:
        yield (
            f"num_key_value_heads is {shown(n_kv_heads)}; it must divide num_attention_heads "
            f"({heads})"
        )


def read_config(folder: Path) -> LlamaConfig:
    """Return the model that a Hugging Face folder holds; ValueError as for its settings."""
    settings = read_settings(folder)
    try:
        return parse_config(settings)
    except ValueError as error:
        raise ValueError(f"{str(folder / CONFIG_FILE)!r}: {error}") from error


def differences(expected: LlamaConfig, found: LlamaConfig) -> list[str]:
    """Return a sentence for each value in which two models, and so their weights, differ."""
    return [
        f"{name} is {_text(name, there)}, not {_text(name, here)}"
        for name in (field.name for field in fields(LlamaConfig))
        if name not in _NOT_COMPARED
        and not _is_same(here := getattr(expected, name), there := getattr(found, name))
    ]


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-6)  # 1e-5 may have gone through float32
    return left == right


def _text(name: str, value: Any) -> str:
    if value is None:
        return "unscaled" if name == "rope_scaling" else "none"
    if isinstance(value, RopeScaling):
        return (
            f"{value.factor:g} (low {value.low_freq_factor:g}, high {value.high_freq_factor:g}, "
            f"original length {value.original_max_position_embeddings})"
        )
    return f"{value:g}" if isinstance(value, float) else str(value)


def to_settings(config: LlamaConfig) -> dict[str, Any]:
    """Return the contents of a ``config.json`` for ``config``, readable by every transformers."""
    scaling = config.rope_scaling and {"rope_type": "llama3", **vars(config.rope_scaling)}
    settings = {
        "architectures": [f"{config.model_type.capitalize()}ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": config.output_bias,
        "mlp_bias": False,
        **vars(config),
        "rope_scaling": scaling,
    }
    if config.model_type.startswith("qwen"):
        settings["use_sliding_window"] = config.sliding_window is not None
        settings["max_window_layers"] = 0
    return {key: value for key, value in settings.items() if key not in _NO_KEYS}
