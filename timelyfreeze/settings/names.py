"""Names of arguments in messages: as their reader knows them.

Whoever calls the library knows ``seed``, whoever wrote a configuration file knows
``freezing.seed``. The latter's trainer sets names once per process. Errors of fields use these
names.
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
    """Return the name of ``argument`` in messages.

    Either an argument of :class:`timelyfreeze.TimelyFreeze`; with a dot, a setting of a policy, as
    in ``apf.threshold``; or a word for an object of others.
    """
    return _naming[-1](argument)


def begin_anew() -> str:
    """Return how a run goes on without the state of a checkpoint, the end of an error."""
    return f"to begin freezing again, {key('begin_anew')}"


def name_arguments(naming: Naming) -> None:
    """Name arguments in messages by ``naming``, from now on."""
    _naming[-1] = naming


@contextmanager
def arguments_named(naming: Naming) -> Iterator[None]:
    """Name arguments in messages by ``naming``, inside the block."""
    _naming.append(naming)
    try:
        yield
    finally:
        _naming.pop()


# Whole numbers without a largest one.
AtLeast0 = Annotated[int, Within(0)]
AtLeast1 = Annotated[int, Within(1)]


def rule_errors(settings: Any, section: str = "") -> Iterator[str]:
    """Yield the fields of a dataclass with a broken rule: key, value and rule.

    Keys begin with ``section``, such as ``apf``.
    """
    prefix = f"{section}." if section else ""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        if rule := broken_rule(hint, value := getattr(settings, name)):
            yield f"{key(prefix + name)} is {value!r}; {rule}"
