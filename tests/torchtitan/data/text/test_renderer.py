"""Templates that would fill the memory, never end or write for ever are refused, and no other."""

import json
import os
import signal
from typing import Any

import pytest

from torchtitan.data.text import renderer
from torchtitan.data.text.renderer import RenderError, render

ENDLESS = "{% for i in range(9**5) %}" * 4 + "{% endfor %}" * 4
GROWING = (
    "{% set n = namespace(a='ab') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}"
)
MESSAGES = [{"role": "user", "content": "a b\nc"}]


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "_SECONDS", 0.3)


def text(source: str, **tokens: str) -> str:
    return render(source, tokens, MESSAGES).text


@pytest.mark.parametrize(
    "source",
    [
        "{{ 9 ** 999999999 }}",
        "{{ 'a' * 9999999999 }}",
        "{{ 'a'.center(9999999999) }}",
        "{{ 'a'.ljust(9999999999) }}",
        "{{ 'a'.zfill(9999999999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ messages[0].content | indent(9999999999) }}",
        "{{ messages | tojson(indent=9999999999) }}",
        "{{ messages[0].content | wordwrap(1, wrapstring='a' * 9**9) }}",
        "{{ 'ab' * 1500000 }}",
        "{{ lipsum(n=9999999) }}",
        GROWING,
        GROWING.replace("'ab'", "7").replace("~", "*"),
        ENDLESS,
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    ],
)
def test_a_template_gets_no_more_than_its_share(source: str) -> None:
    limits = "more than 512 MiB|more than 0.3 s|more than 2000000 char|recursion"
    with pytest.raises(RenderError, match=limits):
        text(source)
    assert text("{{ messages[0].content }}") == "a b\nc", "the next one is rendered"


def test_what_a_template_says_is_harmless_to_terminals() -> None:
    with pytest.raises(RenderError, match=r"^\\x1b\[31mred$"):
        text("{{ raise_exception('\x1b[31mred') }}")


def test_examples_that_take_long_one_after_the_other_are_bounded_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the process's own clock, here replayed: a few long ones among others do no harm."""
    worker, seconds = renderer._Worker(), [9.0]
    monkeypatch.setattr(renderer, "_worker", worker)
    answer = {"text": "a", "marked": [], "spans": []}
    monkeypatch.setattr(worker, "_exchange", lambda line: {**answer, "seconds": seconds[0]})
    for _ in range(5):
        seconds[0] = 9.0
        assert [text("") for _ in range(7)] == ["a"] * 7
        seconds[0] = 0.0
        assert [text("") for _ in range(60)] == ["a"] * 60
    seconds[0] = 9.0
    assert [text("") for _ in range(7)] == ["a"] * 7
    with pytest.raises(RenderError, match="takes more than 1 s for each of many examples"):
        text("")


def test_the_process_tells_what_it_took() -> None:
    said = {"messages": MESSAGES, "tools": None, "prompt": False, "answers": []}
    limits = {"most": 100, "seconds": 10.0, "bytes": 2**29}
    line = json.dumps({"source": "{{ messages }}", "tokens": {}, **said, **limits})
    assert renderer._Worker()._exchange(f"{line}\n".encode())["seconds"] >= 0.0


@pytest.mark.parametrize("value", [b"", {1, 2}, object()])
def test_a_value_that_is_no_json_is_told(value: Any) -> None:
    with pytest.raises(RenderError, match="has a value that is no JSON"):
        render("", {}, [{"role": value}])


def test_values_arrive_as_they_are() -> None:
    value = {"b": [None, True, 1.5, 10**400, float("inf")], "a": "ä\ud83d\u2028\n"}
    source = "{{ messages[0].b[3] + 1 }}|{{ messages[0].a }}|{{ messages[0].keys() | join }}"
    assert render(source, {}, [value]).text == f"{10**400 + 1}|{value['a']}|ba"


def test_it_goes_on_after_its_process_was_ended() -> None:
    assert text("{{ x }}", x="1") == "1"
    process = renderer._worker._process
    assert process is not None
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGINT)
    assert text("{{ x }}", x="2") == "2"
    assert renderer._worker._process is process, "only who asks decides when it ends"
    process.kill()
    process.wait()
    assert text("{{ x }}", x="3") == "3"


def test_a_process_that_was_forked_has_its_own() -> None:
    assert text("{{ x }}", x="1") == "1"
    process = renderer._worker._process
    child = os.fork()
    if child == 0:
        os._exit(0 if text("{{ x }}", x="2") == "2" and renderer._worker._process != process else 1)
    assert [text("{{ x }}", x=str(i)) for i in range(20)] == [str(i) for i in range(20)]
    assert os.waitpid(child, 0)[1] == 0


def test_a_conversation_of_many_turns_needs_no_more_than_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renderer, "_SECONDS", 10.0)
    messages = [{"role": "assistant", "content": "x" * 4000} for _ in range(400)]
    source = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    found = render(source, {}, messages, answers=list(range(400)))
    assert len(found.text) == 400 * 4001
    assert found.spans[399] == [399 * 4001, 399 * 4001 + 4000]
