"""Renders chat templates, untrusted programs, in a process with limited memory and time.

Run as a file, with jinja2 alone. Requests come as JSON on lines of the standard input, answers go
to the standard output; the process ends with its input.
"""

import json
import resource
import signal
import sys
import time
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationBlocks(Extension):
    """Notes the characters written by ``{% generation %}`` blocks, which mark answers."""

    environment: Any  # has ``noted`` too
    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Any) -> Any:
        """Return a call around the statements inside the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_noted"), [], [], body).set_lineno(line)

    def _noted(self, caller: Any) -> str:
        written, spans = self.environment.noted
        text: str = caller()
        start = sum(map(len, written))
        spans.append((start, start + len(text)))
        return text


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON unchanged; Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _rendered(asked: dict[str, Any], n_messages: int, prompt: bool) -> tuple[str, list[Any]]:
    template = _compiled(asked["source"])
    written: list[str] = []
    spans: list[Any] = []
    template.environment.noted = written, spans
    n_left = asked["most"]
    pieces = template.generate(
        messages=asked["messages"][:n_messages],
        add_generation_prompt=prompt,
        tools=asked["tools"],
        documents=None,
        **asked["tokens"],
    )
    for piece in pieces:
        written.append(piece)
        n_left -= len(piece)
        if n_left < 0:
            raise ValueError(f"its text has more than {asked['most']} characters")
    return "".join(written), spans


def _span(asked: dict[str, Any], text: str, place: int) -> tuple[int, int] | None:
    """Return the span of the answer at ``place``; None where the text has another form."""
    before, until = _rendered(asked, place, True)[0], _rendered(asked, place + 1, False)[0]
    if not (until.startswith(before) and text.startswith(until)):
        return None
    return len(before), max(len(before), len(until.rstrip()))


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    too_much = f"needs more than {asked['bytes'] >> 20} MiB"
    try:
        _compiled(asked["source"])
    except jinja2.TemplateSyntaxError as error:
        return {"broken": f", line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"broken": f": {too_much}"}
    except Exception as error:
        return {"broken": f": {error}"}
    try:
        if asked["messages"] is None:
            return {"text": "", "marked": [], "spans": []}
        text, marked = _rendered(asked, len(asked["messages"]), asked["prompt"])
        spans = [_span(asked, text, place) for place in asked["answers"]]
        return {"text": text, "marked": marked, "spans": spans}
    except MemoryError:
        return {"refused": too_much}
    except Exception as error:  # a program of somebody's, which can fail in any way
        return {"refused": str(error)[:1000] or type(error).__name__}


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin.buffer:
        asked = json.loads(line.decode("utf-8", "surrogatepass"))
        resource.setrlimit(resource.RLIMIT_AS, (asked["bytes"],) * 2)
        # No handler: its default action ends also what never comes back to Python's code.
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
        began = time.process_time()
        answer = json.dumps({**_answer(asked), "seconds": time.process_time() - began}) + "\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
