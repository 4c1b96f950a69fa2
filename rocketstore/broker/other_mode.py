"""A broker's directory belongs to the mode in which its log was created: plain, or as a member of a group.

In the other mode, the broker would start a new log next to the old one, whose messages could no longer be pulled.
(RocketMQ continues from a plain log in DLedger mode; here it is replayed into the group.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from dledger.errors import ConfigError
from dledger.store.format import parse_segment_name
from dledger.store.opening import layout_of
from rocketstore.broker_config import BrokerConfig

_HEAD_BYTES = 8


def refuse_other_mode(config: BrokerConfig) -> None:
    """Raises ``ConfigError`` if a first start in this mode would hide messages of the other one."""
    store = config.store
    root = store.store_path_root_dir
    plain = next(_holding((*store.commit_log_dirs, *store.read_only_commit_log_dirs)), None)
    if config.dledger is not None:
        if plain is not None and not layout_of(config.dledger.store, config.dledger.node_id).directory.exists():
            raise ConfigError(
                [
                    f"{plain} holds the log of a plain broker, which a group cannot continue: its messages would "
                    "become unreadable. Give the group its own storePathRootDir and copy the messages topic by "
                    f"topic: dledger pipeline replay {root} -t TOPIC --to HOST:PORT --to-group NAME --to-topic "
                    "TOPIC"
                ]
            )
        return
    node = next(_holding(sorted(root.glob("dledger-*/data"))), None)
    if node is not None and plain is None:
        raise ConfigError(
            [
                f"{node} holds the log of a group member, which a plain broker cannot read: its messages would "
                "become unreadable. Set enableDLegerCommitLog=true, or give the plain broker another "
                "storePathRootDir"
            ]
        )


def _holding(directories: Iterable[Path]) -> Iterator[Path]:
    """The directories that contain a non-empty segment."""
    for directory in directories:
        if directory.is_dir() and any(_is_written(path) for path in directory.iterdir()):
            yield directory


def _is_written(path: Path) -> bool:
    if parse_segment_name(path.name) is None or not path.is_file():
        return False
    with path.open("rb") as file:
        return any(file.read(_HEAD_BYTES))
