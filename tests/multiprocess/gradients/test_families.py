"""Models of folders other than LLaMA's in pipelines that freeze: gradients are one process's.

Ranks of a lone pipeline are emulated.
"""

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from hybrids import N_MICROBATCHES, Case
from launcher import ROOT, merged, run_scenarios
from one_process import frozen_in, gradients_by_microbatch, masked_sum, rows_of
from test_hybrid_gradients import relative_difference

from tests.torchtitan.helpers.hf_models import FAMILIES, write_folder
from torchtitan.hf.decoder import Decoder
from torchtitan.hf.llama_config import read_config

SETTINGS = {family: {**FAMILIES[family], "num_hidden_layers": 4} for family in FAMILIES}
SETTINGS["qwen3 with biases"] = {**SETTINGS["qwen3"], "attention_bias": True}
# {family: a word in the names of what LLaMA has not}
OWN = {"mistral": None, "qwen2": ".bias", "qwen3": "_norm.weight", "qwen3 with biases": ".bias"}
CASES = [
    Case("alone", "1F1B"),
    Case("alone", "ZBVZeroBubble"),
    Case("alone", "1F1B", precision="bf16"),
    Case("FSDP", "1F1B", is_long=True),
    Case("TP", "ZBVZeroBubble", is_long=True),
]


def marks(family, case):
    """Return a mark for what is long, and for a run of a split backward's on a full one.

    One family has all that the others have and LLaMA has not.
    """
    repeats = case.name == CASES[0].name and family != "qwen3 with biases"
    return [pytest.mark.long] if case.is_long or repeats else []


PAIRS = [
    pytest.param(family, case, id=f"{family}, {case.name}", marks=marks(family, case))
    for case in CASES
    for family in OWN
    if not (case.kind.n_tp > 1 and family.startswith("qwen3"))  # refused: see checks
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("families")
    for family in OWN:
        # Weights are not read: every run begins from those that follow from the names.
        folder = write_folder(place / family, SETTINGS[family])
        shutil.copytree(ROOT / "tests/assets/tokenizer", folder, dirs_exist_ok=True)
    return {family: place / family for family in OWN}


@pytest.fixture(scope="module")
def ranks_of(request, folders, tmp_path_factory):
    """What each rank saw, by family and case; one start for each number of processes."""
    chosen = [
        (item.callspec.params["family"], item.callspec.params["case"])
        for item in request.session.items
        if item.module is request.module
    ]
    seen = {}
    for n in sorted({case.kind.n_processes for _, case in chosen}):
        alike = [pair for pair in chosen if pair[1].kind.n_processes == n]
        scenarios = [
            {
                **case.scenario,
                "name": f"{family}, {case.name}",
                "args": [
                    *case.scenario["args"],
                    "--model.flavor=hf",
                    f"--model.hf_assets_path={folders[family]}",
                ],
            }
            for family, case in alike
        ]
        folder, n_processes = tmp_path_factory.mktemp(f"{n}"), 1 if n == 2 else n
        seen |= run_scenarios(folder, n_processes, scenarios, timeout_s=900)
    return seen


def moved_by_a_rounding(weights):
    """Return weights that float32 could have rounded to instead."""
    torch.manual_seed(0)
    ulp = torch.finfo(torch.float32).eps / 2
    return {name: w * (1 + ulp * torch.randn_like(w)) for name, w in weights.items()}


@pytest.mark.parametrize(("family", "case"), PAIRS)
def test_gradients_equal_those_of_one_process(ranks_of, folders, family, case):
    ranks = ranks_of[f"{family}, {case.name}"]
    weights, replicas = merged(ranks, "weights_before"), rows_of(ranks, case.kind)
    args = read_config(folders[family])
    model = Decoder(replace(args, max_seq_len=replicas[0][0].shape[1]))
    computed = partial(
        gradients_by_microbatch,
        replicas=replicas,
        precision=case.precision,
        cast_weights=case.kind.is_sharded or case.kind.n_tp == 1,
        model=model,
    )
    one = computed(weights)
    rounded_otherwise = computed(moved_by_a_rounding(weights))
    frozen = frozen_in(ranks)
    gradients = merged(ranks, "gradients")
    assert gradients.keys() == frozen.keys() == one.keys()
    for name, gradient in gradients.items():
        expected = masked_sum(one[name], frozen[name])
        assert (gradient is None) == (expected is None), name
        if gradient is None:
            continue
        difference = relative_difference(gradient, expected)
        # Biases of about 1 make some gradients small differences of large terms: then a rounding
        # of the weights moves them by more than elsewhere, and so does one of the logits.
        moved = relative_difference(masked_sum(rounded_otherwise[name], frozen[name]), expected)
        bound = {"fp32": max(1e-6, 8 * moved), "bf16": 1.5e-2}[case.precision]
        assert difference < bound, f"{name}: {difference:.1e}"
    own = [mask for name, mask in frozen.items() if OWN[family] and OWN[family] in name]
    assert bool(own) is (OWN[family] is not None)
    assert not own or any(0 < sum(mask) < N_MICROBATCHES for mask in own)
    assert all(torch.isfinite(g).all() for g in gradients.values() if g is not None)
