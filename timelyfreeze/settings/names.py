"""What messages call an argument of the library: as its reader does.

Whoever calls the library knows ``seed``, whoever wrote a configuration file knows
``freezing.seed``. The latter's trainer says so once, for its process. What breaks the
rule of a field's type is told by these names.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, get_type_hints

from timelyfreeze.files import Within, broken_rule

# Where something else than an argument of ours has to be changed.
_ELSEWHERE = {
    "begin_anew": "load the checkpoint without it",
    "microbatches": "n_microbatches of the schedule",
    "n_ranks": "a pipeline of size",
    "pipeline": "the same stages on each rank",
    "schedule_csv": "the schedule's CSV file",
}
Naming = Callable[[str], str]


_naming: list[Naming] = [lambda argument: _ELSEWHERE.get(argument, argument)]


def key(argument: str) -> str:
    """Return what the reader of a message calls ``argument``.

    It is an argument of :class:`timelyfreeze.TimelyFreeze`; with a dot, a setting of a policy, as
    in ``apf.threshold``; or one of the few words for what is not ours.
    """
    return _naming[-1](argument)


def begin_anew() -> str:
    """Return how a run goes on without the state of a checkpoint, the end of an error."""
    return f"to begin freezing again, {key('begin_anew')}"


def name_arguments(naming: Naming) -> None:
    """Have messages call arguments what ``naming`` returns, from now on."""
    _naming[-1] = naming


@contextmanager
def arguments_named(naming: Naming) -> Iterator[None]:
    """Have messages call arguments what ``naming`` returns, inside the block."""
    _naming.append(naming)
    try:
        yield
    finally:
        _naming.pop()


# Whole numbers without a largest one.
AtLeast0 = Annotated[int, Within(0)]
AtLeast1 = Annotated[int, Within(1)]


def rule_errors(settings: Any, section: str = "") -> Iterator[str]:
    """Yield which fields of a dataclass break the rule of their type: key, value and rule.

    Keys begin with ``section``, such as ``apf``.
    """
    prefix = f"{section}." if section else ""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        if rule := broken_rule(hint, value := getattr(settings, name)):
            yield f"{key(prefix + name)} is {value!r}; {rule}"
