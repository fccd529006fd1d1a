"""The tokenizer of a Hugging Face folder, read as by transformers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from timelyfreeze.files import read_object, shown

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
# Of former releases: both are read where the settings list no added tokens.
_SPECIAL_FILE, _ADDED_FILE = "special_tokens_map.json", "added_tokens.json"
_ADDED, _EXTRA = "added_tokens_decoder", ("extra_special_tokens", "additional_special_tokens")


class FolderTokenizer(HuggingFaceTokenizer):
    """Upstream's tokenizer, with tokens and settings as in transformers.

    Upstream reads special tokens from ``tokenizer_config.json`` alone, takes a token for both ends
    of texts as a beginning only, and keeps ``tokenizer.json``'s maximum length of texts.
    """

    config: dict[str, Any]
    special_tokens: dict[str, str]
    pad_id: int | None

    def _load_tokenizer_from_path(self, tokenizer_path: str) -> Tokenizer:
        tokenizer = Tokenizer.from_file(str(Path(tokenizer_path) / TOKENIZER_FILE))
        self._padding = tokenizer.padding or {}
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _load_config(self, config_path: str) -> dict[str, Any]:
        """Return the settings, with older files' settings, without nulls."""
        folder = Path(config_path).parent
        config = {"pad_token": self._padding.get("pad_token")} | _read(folder / CONFIG_FILE)
        if _ADDED not in config:
            config |= _read(folder / _SPECIAL_FILE)
            added = _read(folder / _ADDED_FILE).items()
            config[_ADDED] = {number: token for token, number in added}
        return config

    def _infer_special_tokens(self) -> None:
        config, tokenizer = self.config, self.tokenizer
        named = {key: _content(token) for key, token in _named(config)}
        lists = (config[key] for key in _EXTRA if isinstance(config.get(key), list))
        extra: list[Any] = next(filter(None, lists), [])
        special = {*named.values(), *map(_content, extra)}
        in_file = tokenizer.get_added_tokens_decoder().values()
        listed = sorted(config[_ADDED].items(), key=lambda entry: int(entry[0]))
        new = [_added(token, _content(token) in special) for _, token in listed]
        new = [token for token in new if repr(token) not in set(map(repr, in_file))]
        known = {token.content for token in (*in_file, *new)}
        others = (*(token for _, token in _named(config)), *extra)
        new += [_added(token, True) for token in others if _content(token) not in known]
        for token in new:
            token.special |= token.content in named.values()
        tokenizer.add_tokens(new)
        tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
        self.special_tokens = named
        for kind in ("bos", "eos", "pad"):
            text = named.get(f"{kind}_token")
            setattr(self, f"{kind}_token", text)
            setattr(self, f"{kind}_id", None if text is None else tokenizer.token_to_id(text))


def _read(path: Path) -> dict[str, Any]:
    try:
        return {key: value for key, value in read_object(path).items() if value is not None}
    except FileNotFoundError:
        return {}


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the named tokens; a model may have names of its own."""
    extra = config.get(_EXTRA[0])
    for key, token in (*config.items(), *(extra.items() if isinstance(extra, dict) else ())):
        if key.endswith("_token") and not isinstance(token, bool | None):
            yield key, token


def _content(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise ValueError(f"{shown(token)} is no token; it must be a text or have one as content")
    return content


def _added(token: Any, is_special: bool) -> AddedToken:
    if not isinstance(token, dict):
        return AddedToken(token, special=is_special)
    return AddedToken(**{key: value for key, value in token.items() if key != "__type"})
