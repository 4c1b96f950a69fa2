"""Reads back everything from every node, through the client APIs."""

from __future__ import annotations

import hashlib
import zlib
from contextlib import closing
from typing import Final

from cluster.drill.history import NodeCopy, ServedMessage
from cluster.drill.target import SECURITY, DrillError
from dledger.client import ReadMode
from dledger.client.blocking import DLedgerClient
from dledger.errors import DLedgerError
from dledger.types import LogIndex, NodeId
from rocketstore.client import Admin

TIMEOUT_S: Final = 10.0
PAGE: Final = 1000


def read_node(
    node: NodeId, address: str, group: str, topic: str, queues: int, end_position: int, *, name: str = ""
) -> NodeCopy:
    """One node's own copy, whatever its role. Raises ``DrillError`` if it cannot be read.

    ``name``: what the copy is called, if not as the node.
    Only the log before ``end_position`` is read: brokers also write to it on their own, even between two reads.
    """
    try:
        with Admin([address], timeout_s=TIMEOUT_S, security=SECURITY) as admin:
            pulled = {one: pull_all(admin, address, topic, one) for one in range(queues)}
        return NodeCopy(NodeId(name or node), pulled, _log(address, group, end_position))
    except DLedgerError as error:
        raise DrillError(f"cannot read back what {node} holds: {error}") from error


def pull_all(admin: Admin, address: str, topic: str, queue_id: int) -> tuple[ServedMessage, ...]:
    """One broker's own copy of a queue, after waiting until it knows what is committed. Raises ``DLedgerError``."""
    stored: list[ServedMessage] = []
    offset = 0
    while True:
        part = admin.read_at(address, topic, queue_id, offset, max_messages=PAGE)
        if not part.messages:
            if offset != part.max_offset:
                raise DrillError(
                    f"{address}: queue {queue_id} ends at {part.max_offset}, but nothing is returned from {offset}"
                )
            return tuple(stored)
        stored += [ServedMessage(one.queue_offset, one.body, zlib.crc32(one.record)) for one in part.messages]
        offset = part.next_offset


def _log(address: str, group: str, end_position: int) -> str:
    """The replicated log's bounds, and a digest of every entry with its position and term."""
    digest = hashlib.sha256()
    with closing(DLedgerClient([address], group=group, timeout_s=TIMEOUT_S, security=SECURITY)) as client:
        status = client.metadata(address=address)
        index, term = status.begin_index, -1
        while True:
            read = client.read(index, count=PAGE, mode=ReadMode.COMMITTED, address=address)
            entries = [entry for entry in read if entry.position < end_position]
            if not entries:
                break
            for entry in entries:
                digest.update(b"%d %d %d %d\n" % (entry.index, entry.term, entry.position, len(entry.body)))
                digest.update(entry.body)
            index, term = LogIndex(entries[-1].index + 1), entries[-1].term
    return f"entries {status.begin_index} to {index - 1}, the last of term {term}, SHA-256 {digest.hexdigest()[:16]}"
