"""Outputs of a frozen front, kept by row: in memory, and in files behind the training."""

from timelyfreeze.control.caching.blocks import check_blocks
from timelyfreeze.control.caching.cache import FrontCache
from timelyfreeze.control.caching.entries import Row
from timelyfreeze.control.caching.folder import (
    EntryFolder,
    FolderInUseError,
    folder_for,
    in_use,
)
from timelyfreeze.control.caching.front import token_digest
from timelyfreeze.control.caching.named_rows import NamedRows
from timelyfreeze.control.caching.store import ActivationStore
from timelyfreeze.control.caching.use import CacheUse, use_of_all, use_of_parts

__all__ = [
    "ActivationStore",
    "CacheUse",
    "EntryFolder",
    "FolderInUseError",
    "FrontCache",
    "NamedRows",
    "Row",
    "check_blocks",
    "folder_for",
    "in_use",
    "token_digest",
    "use_of_all",
    "use_of_parts",
]
