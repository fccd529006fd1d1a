"""Spares tests most of the time that the parser of command lines takes.

It finds help texts by taking the sources of all sections apart, and forgets them after each line.
"""

import functools

from tyro import _docstrings


def remember_sources():
    """Have each class taken apart once a process, as its source does not change."""
    for name in ("get_field_docstring", "get_callable_description"):
        setattr(_docstrings, name, functools.cache(getattr(_docstrings, name).__wrapped__))
