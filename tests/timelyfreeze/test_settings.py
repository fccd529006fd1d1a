"""Words a user may choose from."""

import pytest

from timelyfreeze.phases import PhaseSchedule
from timelyfreeze.settings import FreezeSettings, unknown_words

PHASES = PhaseSchedule(1, 3, 5)
KNOWN = {
    "first_stage": ("all_or_nothing", "keep_chain"),
    "score_memory": ("device", "host"),
    "score_dtype": ("float32", "bfloat16"),
}


@pytest.mark.parametrize("key", KNOWN)
def test_every_known_word_is_taken(key: str) -> None:
    for word in KNOWN[key]:
        assert getattr(FreezeSettings(PHASES, **{key: word}), key) == word
        assert list(unknown_words(**{key: word})) == []


@pytest.mark.parametrize("key", KNOWN)
@pytest.mark.parametrize("word", ["", "Host", "float16"])
def test_another_word_is_told_with_its_key_and_the_known_ones(key: str, word: str) -> None:
    message = f"freezing.{key} is {word!r}; known: {', '.join(KNOWN[key])}"
    assert list(unknown_words(**{key: word})) == [message]
    with pytest.raises(ValueError, match="known") as error:
        FreezeSettings(PHASES, **{key: word})
    assert str(error.value) == message


def test_all_mistakes_are_told_at_once() -> None:
    words = {"first_stage": "half", "score_memory": "host", "score_dtype": "int8"}
    mistakes = [
        "freezing.first_stage is 'half'; known: all_or_nothing, keep_chain",
        "freezing.score_dtype is 'int8'; known: float32, bfloat16",
    ]
    assert list(unknown_words(**words)) == mistakes
    with pytest.raises(ValueError, match="first_stage") as error:
        FreezeSettings(PHASES, **words)
    assert str(error.value) == "; ".join(mistakes)


def test_nothing_asked_nothing_wrong() -> None:
    assert list(unknown_words()) == []
    FreezeSettings(PHASES)
