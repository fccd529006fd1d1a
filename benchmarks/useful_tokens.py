"""Measures learned tokens per processor second: ours, plain TorchTitan and TRL, against our none.

    python benchmarks/useful_tokens.py SMOLLM2 ROWS [--trl-python PYTHON] [--systems NAME ...]
        [--steps 4] [--sequences 4] [--seq-len 1024] [--key=value ...]

SMOLLM2 is a Hugging Face folder, ROWS a JSONL file of Alpaca rows, PYTHON one that has trl, peft
and torch. A system and method none, packed, are a process each and take turns, a step each, with
one thread, in float32. Ours emulate a pipeline of 4 ranks, whose bubbles do not count. Keys go to
ours and to TorchTitan. Learned tokens of a sequence are the mean over all rows.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from block_cost import machine
from turns import WORD

from timelyfreeze.files import markdown_table

_HERE = Path(__file__).resolve().parent
_NONE, _PLAIN, _RANK = "none", "TorchTitan", 16
_NO_PLAN = "--freezing.method=none"
_PLAN = ("last_warmup_step=1", "last_monitor_step=5", "last_ramp_step=6")
OURS = {
    _NONE: [_NO_PLAN],
    "none, unpacked": [_NO_PLAN, "--data.no-packing"],
    "default": [f"--freezing.{key}" for key in _PLAN],
    "lora": ["--freezing.method=lora", f"--lora.rank={_RANK}"],
    _PLAIN: [_NO_PLAN, "--checkpoint.no-enable", "--checkpoint.no-initial_load_in_hf"],
}
TRL = {"TRL": 0, "TRL, peft": _RANK}


def titan_command(name: str, options: argparse.Namespace) -> list[str]:
    """Return what starts ours, or plain TorchTitan; the default warms up and monitors first."""
    plain, cold = name == _PLAIN, 6 if name == "default" else 1
    kind, ranks, batch = ("plain", 1, 1) if plain else ("ours", 4, options.sequences)
    keys = {
        "job.config_file": _HERE.parent / "train_configs" / "smollm2_alpaca_gpt4.toml",
        "job.dump_folder": options.folder, "model.hf_assets_path": options.model,
        "training.dataset_path": options.rows, "training.seq_len": options.seq_len,
        "training.steps": 10**6, "training.mixed_precision_param": "float32",
        "training.local_batch_size": batch, "training.global_batch_size": options.sequences,
        "checkpoint.interval": 10**6, "data.validation_fraction": 0.0, "metrics.log_freq": 10**6,
        "parallelism.pipeline_parallel_degree": ranks,
    }  # fmt: skip
    switches = ["--validation.no-enable", "--plots.no-enable", "--metrics.no-enable_tensorboard"]
    switches += [] if plain else ["--emulation.enable"]
    asked = [f"--{key}={value}" for key, value in keys.items()]
    script = str(_HERE / "useful_titan.py")
    return [sys.executable, script, kind, str(cold), *asked, *switches, *OURS[name], *options.keys]


def worker(name: str, options: argparse.Namespace) -> Iterator[float]:
    """Yield a system's learned tokens of a sequence, then the processor seconds of each step."""
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if name in TRL:
        sizes = map(str, (options.seq_len, options.sequences, TRL[name]))
        script = str(_HERE / "useful_trl.py")
        command = [options.trl_python, script, options.model, options.rows, *sizes]
    else:
        command = titan_command(name, options)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        # Of a world of its own, into which TRL would put its model.
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
        variables |= {"RANK": "0", "WORLD_SIZE": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **variables}, **pipes) as process:
        for line in process.stdout:
            if line.startswith(WORD):
                yield float(line.removeprefix(WORD))
                process.stdin.write("\n")
                process.stdin.flush()
    raise SystemExit(f"{name} has ended with status {process.returncode}")


def main(arguments: list[str] | None = None) -> None:
    """Let all take turns with none, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("--trl-python", help="a Python that has trl, peft and torch")
    parser.add_argument("--systems", nargs="+", default=[*OURS, *TRL], choices=[*OURS, *TRL])
    parser.add_argument("--steps", type=int, default=4, help="steps of each system")
    parser.add_argument("--sequences", type=int, default=4, help="sequences of a step")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a sequence")
    options, options.keys = parser.parse_known_args(arguments)
    if options.trl_python is None:
        print("TRL is left out: --trl-python names no Python that has it.\n")
        options.systems = [name for name in options.systems if name not in TRL]
    rows = []
    with tempfile.TemporaryDirectory() as options.folder:
        none = worker(_NONE, options)
        base = next(none)
        for name in options.systems:
            system = worker(name, options)
            learned = next(system)
            pairs = [(next(none), next(system)) for _ in range(options.steps)]
            system.close()
            before, now = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
            gains = [learned * a / (base * b) for a, b in pairs]
            tokens = learned * options.sequences
            gain = f"{statistics.median(gains):.2f} ({min(gains):.2f}..{max(gains):.2f})"
            numbers = (f"{tokens:.0f}", f"{now:.1f}", f"{before:.1f}", f"{tokens / now:.1f}")
            rows.append([name, *numbers, gain])
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
        none.close()
    print(
        f"{machine()}; one thread, float32; {options.sequences} sequences of {options.seq_len} "
        f"tokens a step, {options.steps} turns; medians of processor seconds\n"
    )
    head = ["system", "learned tokens a step", "s a step", "none's beside it", "learned tokens/s"]
    print(markdown_table([*head, "over none's (min..max)"], rows))


if __name__ == "__main__":
    main()
