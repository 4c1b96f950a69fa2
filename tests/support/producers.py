"""A leader with producers, for tests of the core: appends under names, and what the leader and its log know."""

from __future__ import annotations

from typing import Any

from dledger.core.noop_payload import ProducerSnapshot, Registration, decode_payload, encode_snapshot
from dledger.types import AppendedBatch, HardState, LogIndex, Magic, ProducerBatch, Standing, Term
from tests.support.cluster import Outcome
from tests.support.solo import Solo


def leading(**changes: Any) -> Solo:  # noqa: ANN401  # settings by name
    """A member that leads a group of itself."""
    solo = Solo(1, hard_state=HardState(Term(0), standing=Standing.FULL), **changes)
    solo.lead()
    return solo


def append(solo: Solo, name: str, sequence: int, *bodies: bytes) -> Outcome[AppendedBatch]:
    """Append under a name."""
    outcome: Outcome[AppendedBatch] = Outcome()
    solo.node.quorum_ack.append(bodies, solo.now_ms, outcome, ProducerBatch(name, sequence))
    solo.take()
    return outcome


def commit(solo: Solo) -> None:
    """Flush, and let it count."""
    solo.flush()
    solo.settle_quorum()


def settled(solo: Solo, outcome: Outcome[AppendedBatch]) -> Outcome[AppendedBatch]:
    """After a quorum, the member itself, has confirmed that it leads."""
    commit(solo)
    solo.tick()
    return outcome


def successor(solo: Solo, **changes: Any) -> Solo:  # noqa: ANN401  # settings by name
    """Another member with the same log, which is elected."""
    other = Solo(1, log=solo.log, hard_state=HardState(solo.state.term, standing=Standing.FULL), **changes)
    other.lead()
    return other


def known(solo: Solo) -> dict[str, int]:
    """How far the leader thinks that each producer is."""
    table = solo.leader_role.producers
    return {name: table.next_sequence(name) for name in table._by_name}


def told(solo: Solo) -> list[ProducerSnapshot | Registration]:
    """What the NOOPs of the log tell, oldest first."""
    found = []
    for index in range(solo.log.begin.index + 1, solo.log.last.index + 1):
        entry = solo.log.read(LogIndex(index))
        payload = decode_payload(entry.body) if entry.magic is Magic.NOOP else None
        if payload is not None:
            found.append(payload)
    return found


def bodies_of(solo: Solo) -> list[bytes]:
    """Those of the application's entries."""
    entries = solo.log.read_range(LogIndex(solo.log.begin.index + 1), solo.log.last.index, 1 << 20)
    return [entry.body for entry in entries if entry.magic is Magic.NORMAL]


def newer_payload() -> bytes:
    """A snapshot of a later version."""
    payload = bytearray(encode_snapshot(1, []))
    payload[8] = 2
    return bytes(payload)
