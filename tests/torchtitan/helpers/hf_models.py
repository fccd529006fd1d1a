"""Small Hugging Face folders of each family, and a model that computes straight from their tensors.

The model here is written from the definition, in the layout of the files: halves of a head are
rotated against each other, where upstream rotates neighbours. It shares no code with what it
judges.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

N_LAYERS, VOCABULARY = 6, 2048


def _settings(*, heads: int, kv_heads: int, width: int, ff: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": ff,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        **more,
    }


def _stretched(factor: float) -> dict[str, Any]:
    # A short original context, so that wavelengths of all three kinds occur in a small head.
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }


# In the form of transformers before 5, and of 5.
FAMILIES = {
    "llama2": _settings(heads=4, kv_heads=4, width=64, ff=176, rope_theta=10000.0),
    "llama3": _settings(heads=4, kv_heads=2, width=64, ff=224, rope_theta=500000.0),
    "llama31": _settings(
        heads=4, kv_heads=2, width=64, ff=224, rope_theta=500000.0, rope_scaling=_stretched(8.0)
    ),
    "llama32": _settings(
        heads=8,
        kv_heads=2,
        width=128,
        ff=512,
        rope_parameters={"rope_theta": 500000.0, **_stretched(32.0)},
        tie_word_embeddings=True,
    ),
    "smollm2": _settings(
        heads=3,
        kv_heads=1,
        width=48,
        ff=128,
        rope_parameters={"rope_theta": 100000.0, "rope_type": "default"},
        tie_word_embeddings=True,
    ),
    # Heads together wider than the model, as in Mistral Nemo.
    "mistral": _settings(
        heads=4,
        kv_heads=2,
        width=64,
        ff=224,
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        head_dim=24,
        sliding_window=None,
        rope_theta=1000000.0,
    ),
    "qwen2": _settings(
        heads=4,
        kv_heads=2,
        width=64,
        ff=224,
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        use_sliding_window=False,
        sliding_window=32,
        max_window_layers=3,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
    ),
    "qwen3": _settings(
        heads=4,
        kv_heads=2,
        width=48,
        ff=128,
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        head_dim=20,
        attention_bias=False,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
        tie_word_embeddings=True,
    ),
}


def write_folder(
    folder: Path,
    settings: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    n_files: int = 1,
    seed: int = 0,
) -> Path:
    """Write random weights for ``settings``, over one file or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = random_weights(settings, dtype, seed)
    names = list(weights)
    if n_files == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        index = {}
        for number in range(n_files):
            file = f"model-{number + 1:05}-of-{n_files:05}.safetensors"
            part = names[number::n_files]  # neighbours lie in different files
            save_file({n: weights[n] for n in part}, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": index})
        )
    named = {**settings, "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(named))
    return folder


def random_weights(settings: dict[str, Any], dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width, ff, vocabulary = (
        settings[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    family, heads = settings["model_type"], settings["num_attention_heads"]
    head = settings.get("head_dim", width // heads)
    q, kv = head * heads, head * settings["num_key_value_heads"]

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator) * (0.5 if len(shape) == 1 else 0.1)
        return (values + 1.0 if len(shape) == 1 else values).to(dtype)

    weights = {"model.embed_tokens.weight": draw(vocabulary, width)}
    for layer in range(settings["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (q, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, q),
            "mlp.gate_proj": (ff, width),
            "mlp.up_proj": (ff, width),
            "mlp.down_proj": (width, ff),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        if family == "qwen3":
            shapes |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
        weights |= {f"model.layers.{layer}.{n}.weight": draw(*s) for n, s in shapes.items()}
        if family == "qwen2":
            sizes = {"q": q, "k": kv, "v": kv}
            weights |= {
                f"model.layers.{layer}.self_attn.{n}_proj.bias": draw(size)
                for n, size in sizes.items()
            }
    weights["model.norm.weight"] = draw(width)
    if not settings["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw(vocabulary, width)
    return weights


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return settings and tensors of a folder."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return json.loads((folder / "config.json").read_text()), weights


def some_tokens(n_rows: int, seq_len: int, vocabulary: int = VOCABULARY) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, vocabulary, (n_rows, seq_len), generator=generator)


@torch.no_grad()
def logits_of(folder: Path, tokens: Tensor) -> Tensor:
    """Return the logits of the model in ``folder``, shape (rows, tokens, vocabulary), float32."""
    settings, stored = read_folder(folder)
    weights = {name: tensor.float() for name, tensor in stored.items()}
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    width = settings.get("head_dim", settings["hidden_size"] // heads)
    n_rows, length = tokens.shape

    def norm(x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + settings["rms_norm_eps"]).rsqrt()
        return x * scale * weights[name]

    def project(x: Tensor, name: str) -> Tensor:
        bias = weights.get(name.replace("weight", "bias"))
        return x @ weights[name].T + (0.0 if bias is None else bias)

    angles = torch.outer(torch.arange(length).float(), torch.tensor(frequencies(settings, width)))
    cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))

    def rotate(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-right, left], -1) * sin

    def split(x: Tensor) -> Tensor:
        return x.view(n_rows, length, -1, width).transpose(1, 2)

    future = torch.full((length, length), -math.inf).triu(1)
    h = weights["model.embed_tokens.weight"][tokens]
    for layer in range(settings["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        x = norm(h, f"{at}.input_layernorm.weight")
        q, k, v = (split(project(x, f"{at}.self_attn.{n}_proj.weight")) for n in "qkv")
        if f"{at}.self_attn.q_norm.weight" in weights:
            q, k = (norm(t, f"{at}.self_attn.{n}_norm.weight") for t, n in ((q, "q"), (k, "k")))
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        fractions = (q @ k.transpose(-1, -2) / math.sqrt(width) + future).softmax(-1)
        together = (fractions @ v).transpose(1, 2).reshape(n_rows, length, -1)
        h = h + project(together, f"{at}.self_attn.o_proj.weight")
        x = norm(h, f"{at}.post_attention_layernorm.weight")
        gate = project(x, f"{at}.mlp.gate_proj.weight")
        up = project(x, f"{at}.mlp.up_proj.weight")
        h = h + project(gate * gate.sigmoid() * up, f"{at}.mlp.down_proj.weight")
    tied = settings["tie_word_embeddings"]
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    return project(norm(h, "model.norm.weight"), head)


def frequencies(settings: dict[str, Any], width: int) -> list[float]:
    """Return the radians a position of each pair of a head, by the rule of Llama 3.1."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or settings["rope_theta"]
    plain = [theta ** (-2 * i / width) for i in range(width // 2)]
    if rope.get("rope_type", "default") == "default":
        return plain
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    stretched = []
    for frequency in plain:
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        if turns > high:
            stretched.append(frequency)
        elif turns < low:
            stretched.append(frequency / rope["factor"])
        else:
            fraction = (turns - low) / (high - low)
            stretched.append((1 - fraction) * frequency / rope["factor"] + fraction * frequency)
    return stretched
