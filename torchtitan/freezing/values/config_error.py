"""The error of a configuration."""

import re

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
