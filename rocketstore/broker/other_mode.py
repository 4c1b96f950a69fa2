"""A plain broker must not start on a group member's directory: it would neither see nor continue the group's log.

The other way round is a road: a group's log continues a plain one (``rocketstore.store.takeover``). Until the group has
stored its first entry, a plain broker may still go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dledger.errors import ConfigError, CorruptLogError
from dledger.store.checkpoint import read_checkpoint
from dledger.store.format import parse_segment_name
from dledger.store.opening import CHECKPOINT_FILE
from dledger.types import NO_INDEX
from rocketstore.broker_config import BrokerConfig
from rocketstore.commit_log.old_log import OLD_LOG_FILE

_HEAD_BYTES = 8


def refuse_other_mode(config: BrokerConfig) -> None:
    """Raises ``ConfigError`` if a plain broker's start would hide a group's messages."""
    if config.dledger is not None:
        return
    store = config.store
    root = store.store_path_root_dir
    plain = any(map(_holds, (*store.commit_log_dirs, *store.read_only_commit_log_dirs)))
    for node in sorted(root.glob("dledger-*")):
        data = node / "data"
        if _continues_another(node) if plain else _holds(data):
            raise ConfigError(
                [
                    f"{data} holds the log of a group member, which a plain broker cannot read: its messages would "
                    "become unreadable. Set enableDLegerCommitLog=true, or give the plain broker another "
                    "storePathRootDir"
                ]
            )


def _continues_another(node: Path) -> bool:
    """Whether a member's log has entries that follow a plain log's."""
    written = [parse_segment_name(path.name) for path in _written(node / "data")]
    if written and 0 not in written:
        return True
    if not (node / OLD_LOG_FILE).exists():
        return False
    try:
        return read_checkpoint(node / CHECKPOINT_FILE).flushed.index != NO_INDEX  # its data may be elsewhere
    except CorruptLogError:
        return True


def _holds(directory: Path) -> bool:
    return any(True for _ in _written(directory))


def _written(directory: Path) -> Iterator[Path]:
    """The non-empty segments of a directory."""
    if directory.is_dir():
        for path in directory.iterdir():
            if _is_written(path):
                yield path


def _is_written(path: Path) -> bool:
    if parse_segment_name(path.name) is None or not path.is_file():
        return False
    with path.open("rb") as file:
        return any(file.read(_HEAD_BYTES))
