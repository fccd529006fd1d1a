"""What a LLaMA model is made of, in the words of a Hugging Face ``config.json``."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from timelyfreeze.files import parse_json, shown

CONFIG_FILE = "config.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# What transformers takes where config.json has no such key.
_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048}
# Neither changes what the weights mean: the length is a limit for training.seq_len, and tied
# embeddings are untied when they are loaded.
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
    """Sizes and constants of a LLaMA model; the names are those of ``config.json``.

    Attributes:
        rope_scaling: None for rotary embeddings that are not scaled, which a factor of 1 means too.
        max_position_embeddings: Longest sequence that the model was trained with.
        tie_word_embeddings: Whether the output layer is the embedding.
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

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


def read_settings(folder: Path) -> dict[str, Any]:
    """Return what ``config.json`` of ``folder`` says.

    Raises:
        ValueError: If there is no such file or it is no JSON object.
    """
    path = folder / CONFIG_FILE
    try:
        settings = parse_json(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{str(folder)!r} has no {CONFIG_FILE}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{str(path)!r} holds {type(settings).__name__}, not an object")
    return settings


def parse_config(settings: Mapping[str, Any]) -> LlamaConfig:
    """Return the model that ``settings``, the contents of a ``config.json``, describe.

    Both forms of the rotary embeddings are understood: ``rope_parameters`` of transformers 5, and
    ``rope_theta`` beside ``rope_scaling`` of the releases before.

    Raises:
        ValueError: Naming everything for which upstream's llama3 has no place.
    """
    problems = list(_unsupported(settings))
    if problems:
        raise ValueError("; ".join(problems))
    rope = _rope_settings(settings)
    return LlamaConfig(
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["intermediate_size"],
        num_hidden_layers=settings["num_hidden_layers"],
        num_attention_heads=settings["num_attention_heads"],
        num_key_value_heads=_n_kv_heads(settings),
        vocab_size=settings["vocab_size"],
        rms_norm_eps=float(_value(settings, "rms_norm_eps")),
        rope_theta=float(rope.get("rope_theta", _DEFAULTS["rope_theta"])),
        rope_scaling=_scaling(rope),
        max_position_embeddings=int(_value(settings, "max_position_embeddings")),
        tie_word_embeddings=bool(settings.get("tie_word_embeddings", False)),
    )


def _value(settings: Mapping[str, Any], key: str) -> Any:
    value = settings.get(key)
    return _DEFAULTS[key] if value is None else value


def _n_kv_heads(settings: Mapping[str, Any]) -> int:
    n_kv_heads = settings.get("num_key_value_heads")
    return settings["num_attention_heads"] if n_kv_heads is None else n_kv_heads


def _rope_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_theta, rope_type and the scaling's keys in one, as transformers 5 has them."""
    rope = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    if rope.get("rope_theta") is None and settings.get("rope_theta") is not None:
        rope["rope_theta"] = settings["rope_theta"]
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    if rope["rope_type"] == "default" or float(rope["factor"]) == 1.0:
        return None
    return RopeScaling(
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )


def _unsupported(settings: Mapping[str, Any]) -> Iterator[str]:
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [
        key
        for key in (*needed, "vocab_size")
        if type(settings.get(key)) is not int or not 1 <= settings[key] < 2**31
    ]
    for key in missing:
        yield f"{key} is {shown(settings.get(key))}; it must be a whole number, 1 or more"
    for key in ("rms_norm_eps", "max_position_embeddings"):
        value = settings.get(key)
        if value is not None and not _is_positive(value):
            yield f"{key} is {shown(value)}; it must be a number above 0"
    kind = settings.get("model_type", "llama")
    if kind != "llama":
        yield f'model_type is {shown(kind)}; it must be "llama"'
    if settings.get("hidden_act", "silu") != "silu":
        yield f'hidden_act is {shown(settings["hidden_act"])}; it must be "silu"'
    for key in ("attention_bias", "mlp_bias"):
        if settings.get(key):
            yield f"{key} is true; upstream's llama3 has no biases, so it must be false"
    if settings.get("quantization_config"):
        yield "quantization_config is set; only weights that are not quantized can be trained"
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(settings.get(key) or {}, dict):
            yield f"{key} is {shown(settings[key])}; it must be an object"
            return
    yield from _unsupported_rope(_rope_settings(settings))
    if missing:
        return
    heads, n_kv_heads = settings["num_attention_heads"], _n_kv_heads(settings)
    if settings["hidden_size"] % heads:
        yield f"num_attention_heads is {heads}; it must divide hidden_size"
    elif settings.get("head_dim") not in (None, settings["hidden_size"] // heads):
        yield (
            f"head_dim is {shown(settings['head_dim'])}; it must be hidden_size / "
            f"num_attention_heads ({settings['hidden_size'] // heads})"
        )
    if type(n_kv_heads) is not int or n_kv_heads < 1 or heads % n_kv_heads:
        yield (
            f"num_key_value_heads is {shown(n_kv_heads)}; it must divide num_attention_heads "
            f"({heads})"
        )


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max


def _unsupported_rope(rope: Mapping[str, Any]) -> Iterator[str]:
    kind, theta = rope["rope_type"], rope.get("rope_theta")
    if theta is not None and not _is_positive(theta):
        yield f"rope_theta is {shown(theta)}; it must be a number above 0"
    if kind == "llama3":
        for scaling_field in fields(RopeScaling):
            if not _is_positive(rope.get(scaling_field.name)):
                yield (
                    f'rope_type is "llama3" and its {scaling_field.name} is '
                    f"{shown(rope.get(scaling_field.name))}; it must be a number above 0"
                )
    elif kind != "default":
        yield f'rope_type is {shown(kind)}; it must be "default" or "llama3"'


def read_config(folder: Path) -> LlamaConfig:
    """Return the model that a Hugging Face folder holds.

    Raises:
        ValueError: If ``config.json`` is missing or has something upstream's llama3 has not.
    """
    settings = read_settings(folder)
    try:
        return parse_config(settings)
    except ValueError as error:
        raise ValueError(f"{str(folder / CONFIG_FILE)!r}: {error}") from error


def differences(expected: LlamaConfig, found: LlamaConfig) -> list[str]:
    """Return a sentence for each value in which two models differ.

    Context length and tied embeddings are left out: loaded weights mean the same with either.
    """
    return [
        f"{name} is {_text(there)}, not {_text(here)}"
        for name in (field.name for field in fields(LlamaConfig))
        if name not in _NOT_COMPARED
        and not _is_same(here := getattr(expected, name), there := getattr(found, name))
    ]


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-6)  # 1e-5 may have gone through float32
    return left == right


def _text(value: Any) -> str:
    if value is None:
        return "unscaled"
    if isinstance(value, RopeScaling):
        return (
            f"{value.factor:g} (low {value.low_freq_factor:g}, high {value.high_freq_factor:g}, "
            f"original length {value.original_max_position_embeddings})"
        )
    return f"{value:g}" if isinstance(value, float) else str(value)


def to_settings(config: LlamaConfig) -> dict[str, Any]:
    """Return the contents of a ``config.json`` for ``config``, readable by every transformers."""
    scaling = config.rope_scaling
    plain = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name != "rope_scaling"
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": config.head_dim,
        **plain,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            **{field.name: getattr(scaling, field.name) for field in fields(scaling)},
        },
    }


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a Hugging Face folder of ``config`` has.

    A tied output layer is not among them.
    """
    width, ff = config.hidden_size, config.intermediate_size
    kv_width = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, width)}
    for layer in range(config.num_hidden_layers):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (width, width),
                "self_attn.k_proj": (kv_width, width),
                "self_attn.v_proj": (kv_width, width),
                "self_attn.o_proj": (width, width),
                "mlp.gate_proj": (ff, width),
                "mlp.up_proj": (ff, width),
                "mlp.down_proj": (width, ff),
                "input_layernorm": (width,),
                "post_attention_layernorm": (width,),
            }.items()
        }
    shapes["model.norm.weight"] = (width,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, width)
    return shapes
