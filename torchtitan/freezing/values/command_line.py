"""Reads the command line and its TOML file into a configuration, with all errors of form.

Upstream's manager takes anything in a TOML file: a number in place of a section is left out in
silence, and a text in place of a number fails much later. Here all keys and types are checked
first, by the annotations of the configuration.
"""

import difflib
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torchtitan.config import ConfigManager

from timelyfreeze.cli.hub import last_value, value_of
from timelyfreeze.files import shown, table_values
from torchtitan.data.rows.kinds import has_rows
from torchtitan.freezing.values.pipeline import partition_errors
from torchtitan.settings import JobConfig, job_config_class, preset_errors, with_values

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


# A value that nobody would read to its end; a path may be long.
_LONG_WORD = re.compile(r"[^\s'\",]{600,}")


class ConfigError(ValueError):
    """The configuration has errors; the message lists key, value and rule of all."""

    def __init__(self, *errors: str) -> None:
        number = "an error" if len(errors) == 1 else f"{len(errors)} errors"
        lines = [
            _LONG_WORD.sub(lambda word: f"{word[0][:100]}... ({len(word[0])} characters)", error)
            for error in errors
        ]
        told = "\n".join(f"  - {line}" for line in lines)
        super().__init__(f"The configuration has {number}:\n{told}")


def read_values(args: Sequence[str]) -> tuple[JobConfig, set[str]]:
    """Return the configuration of ``args`` and their TOML file, and the keys given in them.

    A ConfigError names every wrong key.
    """
    args = ["--report.quiet" if arg == "--quiet" else arg for arg in args]
    path, config_class = last_value(args, "job.config_file"), job_config_class()
    table = {} if path is None else read_toml(path)
    # A module of the user's has keys that only upstream's manager knows.
    args = list(_as_upstream_spells(config_class, args))
    if not value_of(args, table, "job.custom_config_module"):
        errors = [f"{error} (in {path})" for error in form_errors(config_class, table)]
        errors += _argument_errors(config_class, args)
        if errors:
            raise ConfigError(*errors)
    manager = ConfigManager(config_class)
    manager._maybe_load_toml = lambda args: table  # type: ignore[method-assign]  # read already
    try:
        job_config = manager.parse_args(list(args))
    except (ValueError, ImportError, AttributeError) as error:
        raise ConfigError(str(error)) from error
    errors, at_home = [], {}
    for key, value in _values(job_config):
        # For NaN nothing has a use, and every comparison is false, with itself too.
        if any(one != one for one in (value if isinstance(value, list) else [value])):
            errors.append(f"{key} is {shown(value)}; it must be a number")
        elif (found := _find_home(value)) != value:
            at_home[key] = found
        elif isinstance(value, str) and value.startswith("~") and "/" in value:
            errors.append(f"{key} is {shown(value)}, and there is no such user; write the folder")
    in_arguments = set(_argument_keys(args))
    given = {*dict(table_values(table)), *in_arguments}
    kind = job_config.training.dataset
    if job_config.validation.enable and "validation.dataset" not in given and has_rows(kind):
        at_home["validation.dataset"] = kind  # the training's data, unless told otherwise
    job_config = with_values(job_config, at_home)
    # On the command line a partition takes the place of the cut that the file has.
    cuts = in_arguments if "parallelism.partition" in in_arguments else given
    errors += [*preset_errors(job_config, given), *partition_errors(job_config, cuts)]
    if errors:
        raise ConfigError(*errors)
    return job_config, given


def _values(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a configuration."""
    for field in fields(section):
        value, key = getattr(section, field.name), f"{prefix}{field.name}"
        if is_dataclass(value):
            yield from _values(value, f"{key}.")
        else:
            yield key, value


def _find_home(value: Any) -> Any:
    """Return a value with ``~/`` at the beginning of texts, paths, expanded."""
    if isinstance(value, list):
        return [_find_home(one) for one in value]
    is_path = isinstance(value, str) and value.startswith("~") and "\0" not in value
    return os.path.expanduser(value) if is_path else value


def _argument_keys(args: Sequence[str]) -> Iterator[str]:
    """Yield the keys on the command line."""
    for arg in args:
        if arg.startswith("--"):
            *sections, name = arg[2:].partition("=")[0].replace("-", "_").split(".")
            yield ".".join([*sections, name.removeprefix("no_")])


def read_toml(path: str) -> dict[str, Any]:
    """Return the tables of a TOML file; a ConfigError names it and, if it is no TOML, the line."""
    try:
        with open(path, "rb") as file:
            return tomllib.loads(file.read().decode("utf-8-sig"))
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except RecursionError:
        why = "is no TOML: it is nested too deeply"
    except ValueError as error:
        why = f"is no TOML: {error}"
    raise ConfigError(f"job.config_file is {path!r}, which {why}")


def form_errors(section: type, table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield unknown keys of a dataclass's table, and values of another type."""
    known = typing.get_type_hints(section)
    for key, value in table.items():
        name = f"{prefix}{key}"
        if key not in known:
            yield _unknown(key, known, prefix)
        elif is_dataclass(known[key]):
            if isinstance(value, dict):
                yield from form_errors(known[key], value, f"{name}.")
            else:
                yield f"{name} is {shown(value)}; it is a section, [{name}]"
        elif asked := _asked(known[key], value):
            yield f"{name} is {shown(value)}; it must be {asked}"


def _unknown(key: str, known: Mapping[str, Any], prefix: str) -> str:
    near = [name for name in known if key in name] or difflib.get_close_matches(key, known, n=1)
    named = " and ".join(f"{prefix}{name}" for name in near[:3])
    hint = f"; the nearest is {named}" if near else f"; known: {', '.join(known)}"
    return f"{prefix}{key} is no key of the configuration{hint}"


def _as_upstream_spells(config_class: type, args: Sequence[str]) -> Iterator[str]:
    """Yield arguments with ``--a.b=true`` as a switch, and the words of a list joined."""
    words = list(args)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        kind = _kind_of(config_class, flag[2:].replace("-", "_"))
        while kind == list[str] and words and not words[0].startswith("--"):
            value, equals = f"{value}{',' if equals else ''}{words.pop(0)}", "="
        if kind is bool and value in ("true", "false"):
            section, _, name = flag.rpartition(".")
            yield flag if value == "true" else f"{section}.no-{name}"
        else:
            yield f"{flag}{equals}{value}"


def _kind_of(section: Any, key: str) -> Any:
    """Return the type of a key's values; None if there is no such key."""
    for word in key.split("."):
        section = typing.get_type_hints(section).get(word) if is_dataclass(section) else None
    return section


def _argument_errors(config_class: type, args: Sequence[str]) -> Iterator[str]:
    """Yield unknown keys of the command line, in the words for a file."""
    for name in _argument_keys(args):
        known, prefix = typing.get_type_hints(config_class), ""
        for key in name.split(".") if name not in ("help", "") else ():
            if key not in known:
                yield _unknown(key, known, prefix)
                break
            prefix += f"{key}."
            known = typing.get_type_hints(known[key]) if is_dataclass(known[key]) else {}


def _asked(kind: Any, value: Any = None) -> str | None:
    """Return the rule of the annotated type ``kind`` for a wrong ``value``, or None."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        words = [_asked(one, value) for one in arguments if one is not types.NoneType]
        return None if None in words else " or ".join(dict.fromkeys(filter(None, words)))
    if origin is typing.Literal:
        known = ", ".join(f'"{one}"' for one in arguments)
        return None if isinstance(value, str) and value in arguments else f"one of {known}"
    if origin is list:
        is_list = isinstance(value, list) and not any(_asked(arguments[0], one) for one in value)
        return None if is_list else f"a list, each {_asked(arguments[0])}"
    fits = type(value) is kind or (kind is float and type(value) is int)
    # Any kind that upstream may add is not told apart here.
    return None if fits else _WORDS.get(kind)
