"""A tokenizer whose tokens can be written down by hand, and examples for it."""

from collections.abc import Sequence
from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan.data.rows.examples import InstructExamples
from torchtitan.data.rows.messages import Conversation, Message
from torchtitan.data.sources import ExampleMixture


class NumberTokenizer(BaseTokenizer):
    """Numbers apart by blanks are their own tokens; other words, such as headers, have none."""

    def __init__(self) -> None:
        super().__init__()
        self.eos_id = 1

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        return [int(word) for word in text.split() if word.isdigit()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def get_vocab_size(self) -> int:
        return 10000


def numbered_messages(example: dict[str, Any]) -> Conversation:
    """Example i is 100 + i once or more, then the answer 7."""
    prompt = f"{100 + example['i']} " * example["prompt"]
    return Conversation([Message("user", prompt), Message("assistant", "7")])


def numbered_examples(prompts: Sequence[int]) -> ExampleMixture:
    """Examples with prompts of so many numbers."""
    examples = [{"i": i, "prompt": length} for i, length in enumerate(prompts)]
    place = ("examples.jsonl", len(examples))
    return ExampleMixture([InstructExamples(examples, (place,), numbered_messages)])
