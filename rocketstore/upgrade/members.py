"""The future members of a group: directories of plain brokers, and what is known of each before its log is read."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dledger.errors import ConfigError
from dledger.store.format import parse_segment_name
from dledger.store.fs import TMP_SUFFIX
from dledger.store.identity import LOCK_FILE
from rocketstore.broker_config import BrokerConfig
from rocketstore.commit_log.base_log import group_has_begun, written_segments
from rocketstore.settings import load_broker_settings
from rocketstore.store.directory import ABORT_FILE, CHECKPOINT_FILE

COMMIT_LOG: Final = "commitlog"
BELONGING: Final = ("consumequeue", "index", "index-sums", "timers", "config", CHECKPOINT_FILE)
"""Files that belong to a log, besides its own."""
DISCARDED: Final = ".discarded-"
_MARKS: Final = (LOCK_FILE, ABORT_FILE)


@dataclass(frozen=True, slots=True)
class OldMember:
    """A future member: its root, where its plain log's files are, and its conf file's settings, if there is one."""

    name: str
    root: Path
    log_dirs: tuple[Path, ...]
    writable_dirs: tuple[Path, ...]
    """Those of them in which new files may be made."""
    conf_file: Path | None = None
    config: BrokerConfig | None = None

    @property
    def segment_bytes(self) -> int:
        """The configured size of a log file; 0 if unknown."""
        return 0 if self.config is None else self.config.store.mapped_file_size_commit_log

    @property
    def config_dir(self) -> Path:
        """Where the files with its topics, groups and offsets are."""
        return self.root / "config"

    @property
    def stopped_cleanly(self) -> bool:
        """Whether its last stop was clean."""
        return not (self.root / ABORT_FILE).exists()

    @property
    def group_log(self) -> Path | None:
        """The directory of a group's log that has entries; None if there is none. Raises ``OSError``."""
        return next((node for node in sorted(self.root.glob("dledger-*")) if _has_begun(node)), None)


def _has_begun(node: Path) -> bool:
    return group_has_begun(node) or any(True for _ in written_segments(node / "data"))


def find_members(roots: Sequence[Path], conf_files: Sequence[Path]) -> list[OldMember]:
    """The brokers below these roots, whose conf files are matched by ``storePathRootDir``, otherwise in order.

    Without roots, the conf files name them. Raises ``ConfigError`` for everything that is wrong with them.
    """
    problems: list[str] = []
    configs = [(path, one) for path in conf_files if (one := _loaded(path, problems)) is not None]
    if not roots:
        roots = [config.store.store_path_root_dir for _, config in configs]
    elif conf_files and len(conf_files) != len(roots):
        problems.append(f"{len(roots)} directories, but {len(conf_files)} conf files: give one for each, or none")
    problems += [f"{path} is not a directory" for path in roots if not path.is_dir()]
    if problems:
        raise ConfigError(problems)
    same = Counter(path.resolve() for path in roots)
    problems += [f"{path} is given {count} times" for path, count in same.items() if count > 1]
    names = _names(roots)
    members: list[OldMember] = []
    for number, root in enumerate(roots):
        found = next((one for one in configs if one[1].store.store_path_root_dir.resolve() == root.resolve()), None)
        conf_file, config = found or (configs[number] if configs else (None, None))
        writable, read_only = _log_dirs(root, config)
        every = tuple(dict.fromkeys((*writable, *read_only)))
        may_grow = tuple(path for path in writable if path not in read_only)
        member = OldMember(names[number], root, every, may_grow or writable, conf_file, config)
        problems += [
            f"{path} is where {other.name} and {member.name} both write their log: each member needs its own"
            for other in members
            for path in sorted(
                {one.resolve() for one in member.writable_dirs} & {one.resolve() for one in other.log_dirs}
            )
        ]
        members.append(member)
        problems += _not_a_broker(member)
    if problems:
        raise ConfigError(problems)
    return members


def _loaded(path: Path, problems: list[str]) -> BrokerConfig | None:
    try:
        return load_broker_settings(path, {}, {})[0]
    except ConfigError as error:
        problems += [one if str(path) in one else f"{path}: {one}" for one in error.problems]
        return None


def _names(roots: Sequence[Path]) -> list[str]:
    short = [path.resolve().name for path in roots]
    return short if len(set(short)) == len(short) else [str(path) for path in roots]


def _log_dirs(root: Path, config: BrokerConfig | None) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The log's directories, and those that are only read; those below the root are looked for where it is mounted."""
    if config is None:
        return (root / COMMIT_LOG,), ()
    own, store = config.store.store_path_root_dir, config.store

    def moved(paths: Sequence[Path]) -> tuple[Path, ...]:
        return tuple(root / path.relative_to(own) if path.is_relative_to(own) else path for path in paths)

    return moved(store.commit_log_dirs), moved(store.read_only_commit_log_dirs)


def _not_a_broker(member: OldMember) -> list[str]:
    """Why these are not a plain broker's files. An empty directory is that of a member to be."""
    root = member.root
    held = sorted({path.name.removesuffix(TMP_SUFFIX) for path in root.iterdir()} - {*_MARKS})
    if not held or any(path.is_dir() for path in member.log_dirs):
        return []
    if (root / "data").is_dir() and (root / "index").is_dir():
        return [f"{root} is a group member's log, not a plain broker's root: `dledger pipeline audit` compares those"]
    if member.group_log is not None:
        return [f"{root} holds a group member's log and no plain one: `dledger pipeline audit` compares those"]
    if parse_segment_name(held[0]) is not None:
        return [f"{root} holds log files itself: name the broker's root, which has them in {COMMIT_LOG}/"]
    if all(name in BELONGING or DISCARDED in name for name in held):
        return []  # a copy was interrupted
    missing = ", ".join(map(str, member.log_dirs))
    return [f"{root} is not a broker's directory: {missing} does not exist; an empty directory is a member to be"]


def in_use(root: Path) -> bool:
    """Whether a broker, ours or RocketMQ's, has the directory open."""
    try:
        fd = os.open(root / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1)
    except BlockingIOError:
        return True
    finally:
        with suppress(OSError):
            os.close(fd)
    return False
