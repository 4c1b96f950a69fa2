"""A plain broker must not start on a group member's directory: it would neither see nor continue the group's log.

The other way round is a road: a group's log continues a plain one (``rocketstore.store.takeover``). Until the group has
stored its first entry, a plain broker may still go on.
"""

from __future__ import annotations

from pathlib import Path

from dledger.errors import ConfigError
from rocketstore.broker_config import BrokerConfig
from rocketstore.commit_log.old_log import group_has_begun, written_segments


def refuse_other_mode(config: BrokerConfig) -> None:
    """Raises ``ConfigError`` if a plain broker's start would hide a group's messages."""
    if config.dledger is not None:
        return
    store = config.store
    root = store.store_path_root_dir
    plain = any(map(_holds, (*store.commit_log_dirs, *store.read_only_commit_log_dirs)))
    for node in sorted(root.glob("dledger-*")):
        data = node / "data"
        if group_has_begun(node) if plain else _holds(data):
            raise ConfigError(
                [
                    f"{data} holds the log of a group member, which a plain broker cannot read: its messages would "
                    "become unreadable. Set enableDLegerCommitLog=true, or give the plain broker another "
                    "storePathRootDir"
                ]
            )


def _holds(directory: Path) -> bool:
    return any(True for _ in written_segments(directory))
