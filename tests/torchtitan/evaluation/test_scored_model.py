"""A small model of transformers, scored by lm-eval as its logits say."""

from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed (scripts/setup.sh eval)")


from tests.torchtitan.evaluation.question_files import write_questions
from tests.torchtitan.evaluation.test_evaluation_harness import (
    ROOT,
    _nobody_asks_for_the_environment,  # noqa: F401 - for every test
    lm_eval_in_this_process,
)
from timelyfreeze.records.scores import read_scores
from torchtitan.evaluation.command import main
from torchtitan.evaluation.harness import Runner, lm_eval_tasks, run_lm_eval

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "runner",
    [lm_eval_in_this_process, pytest.param(run_lm_eval, marks=pytest.mark.long)],
)
def test_a_small_model_is_scored_as_its_logits_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: Runner
) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tests" / "assets" / "tokenizer")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
            initializer_range=0.5,
        )
    ).eval()  # fmt: skip
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    files = write_questions(tmp_path / "files", n_asked=8)
    # A task of our own shows that any can be asked.
    (tmp_path / "own.yaml").write_text(
        f"include: {lm_eval_tasks()}/hellaswag/hellaswag.yaml\ntask: own\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{validation: {files}/hellaswag_validation.jsonl.gz}}}}\n"
        "training_split: null\n"
    )
    arguments = ["--data-dir", str(files), "--tasks", "hellaswag", "--device", "cpu"]
    assert main([str(folder), *arguments, "--batch-size", "3"], runner=runner) == 0
    scores = read_scores(folder)
    assert (scores.dtype, scores.device) == ("float32", "cpu")
    accuracy = scores.benchmarks["hellaswag"].accuracy
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own = [str(folder), "--tasks", "own", "--output", str(tmp_path / "own"), "--device", "cpu"]
    assert main([*own, "--", "--include_path", str(tmp_path)], runner=runner) == 0
    assert read_scores(tmp_path / "own").further["own"]["acc,none"] == accuracy

    n_right = 0
    for n in range(8):
        likelihoods = []
        for k in range(4):
            prompt = tokenizer(f"Juggling: A man holds {n} balls. He")["input_ids"]
            both = tokenizer(
                f"Juggling: A man holds {n} balls. He throws {k} of {n}. Then he rests."
            )["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([both])).logits[0].log_softmax(-1)
            positions = range(len(prompt), len(both))
            likelihoods.append(sum(float(logits[i - 1, both[i]]) for i in positions))
        n_right += likelihoods.index(max(likelihoods)) == n % 4
    assert accuracy == n_right / 8
