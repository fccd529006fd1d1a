"""Spares tests most of the time that the parser of command lines takes.

It takes the sources of all sections apart for help texts, and their fields for its arguments, and
forgets both after each line.
"""

import copy
import functools

import tyro
from tyro import _docstrings
from tyro._parsers import ParserSpecification


def remember_sources():
    """Have each class taken apart once a process, as its source does not change."""
    for name in ("get_field_docstring", "get_callable_description"):
        setattr(_docstrings, name, functools.cache(getattr(_docstrings, name).__wrapped__))
    _remember_arguments()


def _remember_arguments():
    """Have the arguments of each class and its defaults found once."""
    find, parse, found = ParserSpecification.from_callable_or_type, tyro.cli, {}

    def remembered(f, *, default_instance, **given):
        if given["intern_prefix"]:
            return find(f, default_instance=default_instance, **given)
        key = f, repr(default_instance), given["description"]
        if key not in found:
            found[key] = find(f, default_instance=default_instance, **given)
        return found[key]

    ParserSpecification.from_callable_or_type = staticmethod(remembered)
    # Lists that were given nowhere are those of the defaults that were met first.
    tyro.cli = lambda *args, **settings: copy.deepcopy(parse(*args, **settings))
