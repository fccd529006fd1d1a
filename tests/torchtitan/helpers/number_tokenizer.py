"""A tokenizer whose tokens can be written down by hand."""

from torchtitan.components.tokenizer import BaseTokenizer


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
