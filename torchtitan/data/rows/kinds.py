"""The kinds of rows, known by their columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan.data.rows.messages import (
    BESIDE,
    HISTORY,
    MessageReader,
    alpaca_messages,
    chat_messages,
    completion_messages,
    sharegpt_messages,
)


@dataclass(frozen=True)
class RowKind:
    """A kind of instruction data: its fields by their usual names, and its data set on the hub."""

    fields: tuple[str, ...]
    messages: MessageReader
    default_path: str | None = None
    optional: tuple[str, ...] = ()


# In the order in which they are looked for: rows with messages often have a prompt too.
ROW_KINDS = {
    "messages": RowKind(("messages",), chat_messages),
    "sharegpt": RowKind(("conversations",), sharegpt_messages, "teknium/OpenHermes-2.5"),
    "prompt_completion": RowKind(("prompt", "completion"), completion_messages),
    "alpaca": RowKind(
        *(("instruction", "output"), alpaca_messages, "vicgalle/alpaca-gpt4"),
        optional=("input", HISTORY),
    ),
}

AUTO, IMAGES = "auto", "images"
INSTRUCT_DATASETS = (AUTO, *ROW_KINDS)


def is_instruct_dataset(name: str) -> bool:
    """Whether ``training.dataset`` names instruction data; other names are upstream's."""
    return name.lower() in INSTRUCT_DATASETS


def is_image_dataset(name: str) -> bool:
    """Whether ``training.dataset`` names pictures and their classes."""
    return name.lower() == IMAGES


def has_rows(name: str) -> bool:
    """Whether a data set has numbered examples, and so a length of epochs and changing readers."""
    return is_instruct_dataset(name) or is_image_dataset(name)


def has_turns(name: str) -> bool:
    """Whether examples of the data set ``name`` may have several answers."""
    return is_instruct_dataset(name) and name.lower() != "alpaca"


class RowShape(NamedTuple):
    """Shape of a source's rows: a name in :data:`ROW_KINDS`, and the columns of fields."""

    kind: str
    required: Mapping[str, str]
    optional: Mapping[str, str]

    @property
    def columns(self) -> dict[str, str]:
        """The column of every field."""
        return {**self.required, **self.optional}

    def told(self, there: Sequence[str]) -> str:
        """Return the kind, its columns as far as rows have them, and the others, for people."""
        names = [
            column if field == column else f"{column} (as {field})"
            for field, column in self.columns.items()
            if column in there
        ]
        others = [column for column in there if column not in self.columns.values()]
        left = f"; left out: {', '.join(others)}" if others else ""
        return f"rows of kind {self.kind!r}, columns {', '.join(names)}{left}"


def row_shape(name: str, there: Sequence[str], named: Mapping[str, str]) -> RowShape:
    """Return the shape of rows by the first's columns; "auto": the first fitting kind.

    ``named`` are columns called otherwise than their field. For a missing column the field's own
    name is tried, since sources may differ. ValueError if no kind fits.
    """

    def column(field: str) -> str:
        wanted = named.get(field) or field
        return field if wanted not in there and field in there else wanted

    def shape(kind: str) -> RowShape:
        spec = ROW_KINDS[kind]
        required = {field: column(field) for field in spec.fields}
        more = {field: column(field) for field in (*spec.optional, *BESIDE)}
        optional = {f: name for f, name in more.items() if name not in required.values()}
        return RowShape(kind, required, optional)

    if name != AUTO:
        return shape(name)
    for found in map(shape, ROW_KINDS):
        if set(found.required.values()) <= set(there):
            return found
    kinds = "; ".join(f"{', '.join(spec.fields)} ({kind})" for kind, spec in ROW_KINDS.items())
    raise ValueError(
        f"has the columns {list(there)}, of which no kind of rows is made: {kinds}; name columns "
        "that are called otherwise in [data.columns]"
    )
