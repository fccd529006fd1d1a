"""A tokenizer whose tokens can be written down by hand."""

from torchtitan.components.tokenizer import BaseTokenizer


class NumberTokenizer(BaseTokenizer):
    """Texts are numbers apart by spaces, which are their own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.eos_id = 1

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def get_vocab_size(self) -> int:
        return 10000
