"""What the Java line keeps beside its log, for a directory that one of its nodes has used.

``currterm`` and (before 0.4) ``checkpoint`` are texts of Java properties. The latter has our checkpoint's name, and
takes its place when Java opens a directory of ours.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dledger import properties
from dledger.errors import ConfigError
from dledger.store.hard_state import MIRROR_FILE
from dledger.types import HardState, NodeId, Term

_CHECKPOINT_BYTES_MAX = 4096


def is_java_checkpoint(path: Path) -> bool:
    """Whether the file is a checkpoint that Java wrote. Raises ``OSError``."""
    if not path.exists() or path.stat().st_size > _CHECKPOINT_BYTES_MAX:
        return False
    found = _read(path)
    return bool(found) and found.keys() <= {"endIndex", "committedIndex"}


def newest_hard_state(known: HardState, directory: Path, last_term: Term) -> HardState:
    """``known``, or what follows from Java's term and vote and from the log's last term, if they are newer.

    Raises ``OSError``.
    """
    path = directory / MIRROR_FILE
    found = _read(path) if path.exists() else {}
    with suppress(ValueError):
        java_term = Term(int(found.get("currTerm", "")))
        if java_term > known.term:
            vote = found.get("voteLeader", "")
            known = HardState(java_term, NodeId(vote) if vote else None, known.voter)
    return known if known.term >= last_term else HardState(last_term, voter=known.voter)


def _read(path: Path) -> dict[str, str]:
    try:
        return {one.key: one.value for one in properties.parse(properties.decode(path.read_bytes()))}
    except ConfigError:
        return {}
