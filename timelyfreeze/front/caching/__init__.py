"""Outputs of a frozen front, kept by row: in memory, and in files behind the training."""

from timelyfreeze.front.caching.cache import FrontCache
from timelyfreeze.front.caching.folder import EntryFolder, Row, folder_for, in_use
from timelyfreeze.front.caching.front import check_blocks, token_digest
from timelyfreeze.front.caching.library import NamedRows
from timelyfreeze.front.caching.store import ActivationStore
from timelyfreeze.front.caching.verdict import CacheUse, use_of_all, use_of_parts
