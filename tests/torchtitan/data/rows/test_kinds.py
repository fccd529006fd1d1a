import pytest

from torchtitan.data.rows.kinds import INSTRUCT_DATASETS, RowShape, has_turns, row_shape


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        (["messages"], "messages"),
        (["prompt", "prompt_id", "messages"], "messages"),  # as ultrachat_200k has them
        (["id", "conversations"], "sharegpt"),
        (["prompt", "completion"], "prompt_completion"),
        (["instruction", "input", "output", "text"], "alpaca"),  # as alpaca-gpt4 has them
        (["output", "instruction"], "alpaca"),
    ],
)
def test_the_kind_is_chosen_by_the_columns(columns: list[str], kind: str) -> None:
    assert row_shape("auto", columns, {}).kind == kind


def test_columns_that_are_called_otherwise() -> None:
    named = {"prompt": "question", "completion": "answer"}
    shape = row_shape("auto", ["question", "answer", "instruction"], named)
    assert shape == RowShape(
        "prompt_completion", {"prompt": "question", "completion": "answer"}, {"tools": "tools"}
    )
    told = "rows of kind 'prompt_completion', columns question (as prompt), answer (as completion)"
    assert shape.told(["question", "answer"]) == told
    # Another source, which calls them as they are usually called.
    assert row_shape("auto", ["prompt", "completion"], named).required == {
        "prompt": "prompt",
        "completion": "completion",
    }


def test_rows_of_no_kind_are_told_with_their_columns() -> None:
    with pytest.raises(ValueError, match=r"has the columns \['text'\], of which .*data\.columns"):
        row_shape("auto", ["text"], {})


def test_a_kind_that_is_named_is_taken() -> None:
    shape = row_shape("prompt_completion", ["messages", "prompt", "completion"], {})
    assert shape.kind == "prompt_completion"


def test_kinds_that_may_have_several_answers() -> None:
    assert [name for name in INSTRUCT_DATASETS if not has_turns(name)] == ["alpaca"]
    assert not has_turns("c4")
