"""Contents of a LLaMA, Mistral, Qwen2 or Qwen3 model, in the words of ``config.json``."""

import math
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Annotated, Any

from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

from timelyfreeze.files import OneOf, Within, read_as, read_object
from torchtitan.hf.decoder import DecoderArgs

CONFIG_FILE = "config.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# What transformers takes where config.json has no such key.
_DEFAULTS = {"model_type": "llama", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
_DEFAULTS_OF = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
_DEFAULT_WINDOW = 4096
# What upstream calls what config.json names, and what such a value may be.
_Whole = Annotated[int, Within(1, 2**31, below=True)]
_Positive = Annotated[float, Within(0.0, above=True)]
_NAMES = {
    "hidden_size": ("dim", _Whole),
    "num_hidden_layers": ("n_layers", _Whole),
    "num_attention_heads": ("n_heads", _Whole),
    "num_key_value_heads": ("n_kv_heads", _Whole),
    "vocab_size": ("vocab_size", _Whole),
    "rms_norm_eps": ("norm_eps", _Positive),
    "rope_theta": ("rope_theta", _Positive),
    "max_position_embeddings": ("max_seq_len", _Whole),
}
_HINTS = {
    "model_type": Annotated[str, OneOf(*_DEFAULTS_OF)],
    **{name: hint for name, (_, hint) in _NAMES.items()},
    "intermediate_size": _Whole,
    "hidden_act": Annotated[str, OneOf("silu")] | None,
    "head_dim": Annotated[int, Within(2)] | None,
    "sliding_window": Annotated[int, Within(1)] | None,
    "max_window_layers": Annotated[int, Within(0)] | None,
    "layer_types": list[Any] | None,
    **dict.fromkeys(("rope_parameters", "rope_scaling"), dict[str, Any] | None),
    "rope_type": Annotated[str, OneOf("default", "llama3")],
}
# Of Llama 3.1's stretching of long wavelengths, in the order of ``RoPEScalingArgs``.
_SCALING_HINTS = {
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), _Positive),
    "original_max_position_embeddings": _Whole,
}
_REFUSED = {
    "mlp_bias": "true; upstream's feed-forward has no biases, so it must be false",
    "quantization_config": "set; only weights that are not quantized can be trained",
}
# Neither changes what the weights mean: the length is a limit for training.seq_len, and tied
# embeddings are untied when they are loaded.
_NOT_COMPARED = ("max_position_embeddings", "tie_word_embeddings")
_NO_KEYS = ("qkv_bias", "output_bias", "qk_norm")


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the contents of ``folder``'s ``config.json``; ValueError if no JSON object."""
    path = folder / CONFIG_FILE
    try:
        return read_object(path)
    except FileNotFoundError:
        raise ValueError(f"{str(folder)!r} has no {CONFIG_FILE}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error


def read_config(folder: Path) -> DecoderArgs:
    """Return the model of a Hugging Face folder; ValueError as for its settings."""
    settings = read_settings(folder)
    try:
        return parse_config(settings)
    except ValueError as error:
        raise ValueError(f"{str(folder / CONFIG_FILE)!r}: {error}") from error


def parse_config(settings: Mapping[str, Any]) -> DecoderArgs:
    """Return the model described by ``settings``, the contents of a ``config.json``.

    Both forms of the rotary embeddings are understood: ``rope_parameters`` of transformers 5, and
    ``rope_theta`` beside ``rope_scaling`` of the releases before, which wins as in transformers.
    ValueError names all settings without a place in the model.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    family = given.get("model_type", "llama")
    # An odd value may be of any type.
    defaults = _DEFAULTS_OF[family if family in [*_DEFAULTS_OF] else "llama"]
    n_heads = given.get("num_attention_heads")
    given = {**_DEFAULTS, "num_key_value_heads": n_heads, **defaults, **given}
    named = given.get("rope_scaling") or given.get("rope_parameters")
    named = named if isinstance(named, dict) else {}
    rope = {key: value for key, value in named.items() if value is not None}
    given = {**given, "rope_type": rope.get("type", "default"), **rope}
    found = _checked(given)
    scaling = RoPEScalingArgs(scaling_factor=1.0)
    if found.get("factor", 1.0) != 1.0:
        scaling = RoPEScalingArgs(*(found[key] for key in _SCALING_HINTS))
    # The other families do not know the key.
    has_bias = family in ("llama", "qwen3") and bool(given.get("attention_bias"))
    return DecoderArgs(
        **{ours: found[theirs] for theirs, (ours, _) in _NAMES.items()},
        # The half keeps the product, which is rounded down, clear of the next lower number.
        ffn_dim_multiplier=(found["intermediate_size"] + 0.5) / _plain_size(found["hidden_size"]),
        multiple_of=1,
        rope_scaling_args=scaling,
        tie_word_embeddings=bool(given.get("tie_word_embeddings", False)),
        model_type=family,
        head_dim=found["head_dim"],
        qkv_bias=family == "qwen2" or has_bias,
        output_bias=has_bias,
        qk_norm=family == "qwen3",
        sliding_window=_sliding_window(given, settings),
    )


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with rules; ValueError names all breaking a rule."""
    found, problems = {}, []
    is_scaled = given["rope_type"] == "llama3"
    for key, hint in {**_HINTS, **(_SCALING_HINTS if is_scaled else {})}.items():
        try:
            found[key] = read_as(hint, given.get(key), key)
        except ValueError as error:
            problems.append(str(error))
    problems += [f"{key} is {why}" for key, why in _REFUSED.items() if given.get(key)]
    if not problems:
        heads, n_kv_heads = found["num_attention_heads"], found["num_key_value_heads"]
        width = found["head_dim"]
        if width is None and found["hidden_size"] % heads:
            problems.append(
                f"num_attention_heads is {heads}; it must divide hidden_size, or head_dim be set"
            )
        if width is not None and width % 2:
            problems.append(f"head_dim is {width}; it must be an even number, 2 or more")
        if heads % n_kv_heads:
            problems.append(
                f"num_key_value_heads is {n_kv_heads}; it must divide num_attention_heads ({heads})"
            )
    if problems:
        raise ValueError("; ".join(problems))
    return found


def _sliding_window(given: Mapping[str, Any], settings: Mapping[str, Any]) -> int | None:
    """Return the window of layers with a window, or None."""
    if given["model_type"] == "mistral":
        has_window = True
    elif given["model_type"] == "llama" or not given.get("use_sliding_window"):
        has_window = False
    elif "layer_types" in given:
        has_window = "sliding_attention" in given["layer_types"]
    else:
        has_window = given.get("max_window_layers", 28) < given["num_hidden_layers"]
    # Null is none, and no such key is the default.
    return settings.get("sliding_window", _DEFAULT_WINDOW) if has_window else None


def feed_forward_size(args: TransformerModelArgs) -> int:
    """Return the width of upstream's ``FeedForward`` for ``args``."""
    size = _plain_size(args.dim)
    if args.ffn_dim_multiplier is not None:
        size = int(args.ffn_dim_multiplier * size)
    return args.multiple_of * -(-size // args.multiple_of)


def _plain_size(dim: int) -> int:
    return int(2 * 4 * dim / 3)


def _described(args: DecoderArgs) -> dict[str, Any]:
    """Return a model in the words of ``config.json``, or in its own where missing."""
    scaling = dict(zip(_SCALING_HINTS, astuple(args.rope_scaling_args), strict=True))
    return {
        **{theirs: getattr(args, ours) for theirs, (ours, _) in _NAMES.items()},
        "intermediate_size": feed_forward_size(args),
        "rope_scaling": {"rope_type": "llama3", **scaling} if scaling["factor"] != 1.0 else None,
        **{name: getattr(args, name) for name in DecoderArgs.__annotations__},
    }


def differences(expected: DecoderArgs, found: DecoderArgs) -> list[str]:
    """Return a sentence per value in which two models, and so their weights, differ."""
    there = _described(found)
    return [
        f"{name} is {_text(there[name])}, not {_text(here)}"
        for name, here in _described(expected).items()
        if name not in _NOT_COMPARED and not _is_same(here, there[name])
    ]


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-6)  # 1e-5 may have gone through float32
    return bool(left == right)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def to_settings(args: DecoderArgs) -> dict[str, Any]:
    """Return the contents of a ``config.json`` for ``args``, readable by every transformers."""
    settings = {
        "architectures": [f"{args.model_type.capitalize()}ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": args.output_bias,
        "mlp_bias": False,
        **_described(args),
    }
    if args.model_type.startswith("qwen"):
        settings["use_sliding_window"] = args.sliding_window is not None
        settings["max_window_layers"] = 0
    return {key: value for key, value in settings.items() if key not in _NO_KEYS}
