"""A model named by its id on the hub: fetched once per host, a folder from then on."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KEY = "model.hf_assets_path"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Configuration, tokenizer, chat template and generation settings.
_TEXTS = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = ("*.safetensors",)
# Folders hold other forms of the model, and so do files of this name beside Mistral's own.
_OTHER_FORMS = ("*/*", "consolidated*")
_MAX_CHARACTERS = 300


def is_hub_id(name: str) -> bool:
    """Return whether ``name`` is OWNER/MODEL and no path, of a folder or in one, here."""
    return _ID.fullmatch(name) is not None and not Path(name).parent.exists()


def fetch_model(name: str, *, weights: bool) -> str:
    """Return the folder of a model of the hub; cached files are not fetched again.

    A ValueError names key, id and reason of a failure.
    """
    try:
        import huggingface_hub

        folder: str = huggingface_hub.snapshot_download(
            name,
            allow_patterns=[*_TEXTS, *(_WEIGHTS if weights else ())],
            ignore_patterns=list(_OTHER_FORMS),
        )
    except Exception as error:  # of the hub, of the network, of the disk: all have their own
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {' '.join(lines)[:_MAX_CHARACTERS]}"
        raise ValueError(
            f"{KEY} is {name!r}, which is no folder here, and as a model of the hub it cannot be "
            f"fetched ({reason}); name a folder that holds it, or see that the id is right, that "
            "the hub can be reached and that HF_TOKEN may read the model"
        ) from error
    return folder


def with_fetched_model(arguments: Sequence[str]) -> list[str]:
    """Return a run's arguments, with the folder of a model named by an id of the hub.

    Called by the launcher of a host, so that its processes fetch nothing.
    """
    table = config_table(last_value(arguments, "job.config_file"))
    name = value_of(arguments, table, KEY)
    if not (isinstance(name, str) and is_hub_id(name)):
        return list(arguments)
    loads = is_on(arguments, table, "checkpoint.initial_load_in_hf")
    elsewhere = value_of(arguments, table, "checkpoint.initial_load_path")
    folder = fetch_model(name, weights=loads and not elsewhere)
    print(f"{KEY}: {name} of the hub lies in {folder}", flush=True)
    return [*arguments, f"--{KEY}={folder}"]


def config_table(path: Path | str | None) -> dict[str, Any]:
    """Return the tables of a TOML file; errors are left to the checks."""
    try:
        return {} if path is None else tomllib.loads(Path(path).read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}


def _in_file(table: dict[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    values = table.get(section)
    return values.get(name) if isinstance(values, dict) else None


def value_of(arguments: Sequence[str], table: dict[str, Any], key: str) -> Any:
    """Return a key's value from the command line, or else a TOML file; None without."""
    return last_value(arguments, key) or _in_file(table, key)


def is_on(arguments: Sequence[str], table: dict[str, Any], key: str) -> bool:
    """Return whether a key is on; ``--section.no_name``, or ``=false``, switches it off."""
    section, _, name = key.rpartition(".")
    words = {f"__{key}": True, f"__{section}.no_{name}": False}
    given = [argument.replace("-", "_").partition("=") for argument in arguments]
    said = [words[word] != (value == "false") for word, _, value in given if word in words]
    return said[-1] if said else _in_file(table, key) is True


def last_value(arguments: Sequence[str], key: str) -> str | None:
    """Return the last value of ``key``, given as ``--key=value`` or in two words."""
    found = None
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("-", "_") != f"__{key}":
            continue
        if equals:
            found = value
        elif i + 1 < len(arguments):
            found = arguments[i + 1]
    return found
