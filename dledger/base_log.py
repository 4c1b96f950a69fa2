"""The base of a log that continues an older one: the older log's files, on which the members must agree.

Raft replicates only what is appended from now on. Members whose older files differ would serve different messages under
the same offsets, so they must not talk to each other at all, not even vote: the handshake compares both sides'
base logs (``dledger.rpc.peers.identity``). Files expire on every member by itself; what has expired on one side is
not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DIGESTS_MAX: Final = 8192
"""How many of the newest files are compared: their digests fit a handshake."""
_ADVICE: Final = "Stop the members and compare their old logs: dledger upgrade check"


@dataclass(frozen=True, slots=True)
class BaseLog:
    """The files of an older log, all of ``file_bytes``, as they were when it was taken over. Positions in bytes."""

    begin: int
    end: int
    """Where the older log ends and the replicated one begins."""
    file_bytes: int
    digests: tuple[int, ...]
    """CRC32C of what each file holds, for the newest ``DIGESTS_MAX`` of them, oldest first."""
    kept_from: int
    """The start of the first file that is still there; ``end`` if all have expired."""

    @property
    def digests_from(self) -> int:
        """The start of the first file with a digest."""
        return self.end - len(self.digests) * self.file_bytes

    def digest_at(self, base: int) -> int:
        """The digest of the file that starts at ``base``, which must be one of those with a digest."""
        return self.digests[(base - self.digests_from) // self.file_bytes]


def why_apart(ours: BaseLog | None, theirs: BaseLog | None, our_name: str, their_name: str) -> str:
    """Why two members must not replicate with each other; empty if they may. None: the log continues no other."""
    if ours is None or theirs is None:
        return _of_one(ours, their_name, our_name) or _of_one(theirs, our_name, their_name)
    if ours.end != theirs.end or ours.file_bytes != theirs.file_bytes:
        return (
            f"the old log of {their_name} ends at {theirs.end} with files of {theirs.file_bytes} bytes, that of "
            f"{our_name} at {ours.end} with files of {ours.file_bytes} bytes. {_ADVICE}"
        )
    for base in range(max(ours.digests_from, theirs.digests_from), ours.end, ours.file_bytes):
        if ours.digest_at(base) != theirs.digest_at(base):
            return f"the old logs of {their_name} and {our_name} differ in file {base:020d}. {_ADVICE}"
    return _lacking(ours, theirs, our_name, their_name) or _lacking(theirs, ours, their_name, our_name)


def _of_one(one: BaseLog | None, without: str, having: str) -> str:
    if one is None or one.kept_from >= one.end:
        return ""
    return (
        f"{without} has no old log, and {having} still has the files of {one.kept_from} to {one.end}: copy them to "
        f"{without} before its first start. {_ADVICE} --align"
    )


def _lacking(one: BaseLog, other: BaseLog, name: str, other_name: str) -> str:
    """The files that ``one`` never had and ``other`` still has, as a sentence."""
    if one.begin <= other.kept_from or other.kept_from >= other.end:
        return ""
    return (
        f"the old log of {name} begins at {one.begin}, and {other_name} still has it from {other.kept_from} on: copy "
        f"the older files to {name} before its first start. {_ADVICE} --align"
    )
