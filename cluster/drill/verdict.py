"""The verdict: compares what producers and consumers were told with what every node returns. Pure.

The rules, one ``DefectKind`` each:

- an acknowledged message is on every node, once, in the acknowledged queue and at the acknowledged offset;
- a message of unknown outcome is stored at most once, a refused one not at all, and there are no other messages;
- in each queue, the acknowledged messages of the (ordered) producer are in the order in which it sent them;
- a queue's offsets count from 0, without gaps or repeats (nothing is old enough to be removed during a drill);
- all nodes hold the same log and return the same records;
- a consumer receives every acknowledged message, in each of its sessions every queue in order and without gaps, and
  nothing but what is stored there. It may receive a message again in its next session (at least once).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise, zip_longest
from typing import Final, NamedTuple

from cluster.drill.history import DrillDelivery, DrillSend, NodeCopy, SendOutcome
from dledger.types import NodeId

EXAMPLES_MAX: Final = 5


class DefectKind(StrEnum):
    """Kinds of defects."""

    LOST = "lost"
    DUPLICATED = "duplicated"
    OUT_OF_ORDER = "out of order"
    MOVED = "not at its acknowledged position"
    REFUSED_BUT_STORED = "refused but stored"
    NEVER_SENT = "stored but never sent"
    OFFSETS = "queue offsets with gaps or repeats"
    NODES_DIFFER = "nodes that differ"
    NOT_CONSUMED = "acknowledged but never consumed"
    CONSUMED_WRONGLY = "consumed out of order or not as stored"
    CHANGED = "changed by a step of the migration"


@dataclass(frozen=True, slots=True)
class Defect:
    """One violated rule: how often, and the first cases in words."""

    kind: DefectKind
    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DrillVerdict:
    """The figures, and every violated rule."""

    sent: int
    acknowledged: int
    unknown: int
    unknown_stored: int
    """Messages of unknown outcome that are stored."""
    refused: int
    consumed: int
    redelivered: int
    """Repeated deliveries, which are allowed."""
    nodes: tuple[NodeId, ...]
    defects: tuple[Defect, ...]
    earlier: tuple[NodeId, ...] = ()
    """Of a migration: whose copies were read at its earlier stations."""

    @property
    def passed(self) -> bool:
        """Whether every rule holds."""
        return not self.defects

    def count(self, kind: DefectKind) -> int:
        """How often a rule was violated."""
        return sum(one.count for one in self.defects if one.kind is kind)


class MessagePlace(NamedTuple):
    queue_id: int
    queue_offset: int

    def __str__(self) -> str:
        return f"queue {self.queue_id} offset {self.queue_offset}"


def judge(sends: Sequence[DrillSend], deliveries: Sequence[DrillDelivery], copies: Sequence[NodeCopy]) -> DrillVerdict:
    """Check all rules. ``sends`` are in order of their numbers."""
    return judge_migration(sends, deliveries, [Station(len(sends), copies)])


@dataclass(frozen=True, slots=True)
class Station:
    """Where a group stopped on its way: how many messages had been sent by then, and what its brokers held."""

    sent: int
    copies: Sequence[NodeCopy]


def judge_migration(
    sends: Sequence[DrillSend], deliveries: Sequence[DrillDelivery], stations: Sequence[Station]
) -> DrillVerdict:
    """Check all rules at every station, and that none lacks or changes what was in the queues of the one before.

    The figures are those of the last station. ``sends`` are in order of their numbers.
    """
    *before, last = stations
    copies = last.copies
    broken: list[tuple[DefectKind, Iterable[str]]] = []
    for station in stations:
        broken += _broken_rules(sends[: station.sent], station.copies)
    broken += [(DefectKind.CHANGED, _changed(one, other)) for one, other in pairwise(stations)]
    broken += [
        (DefectKind.NOT_CONSUMED, _not_consumed(sends, deliveries)),
        (DefectKind.CONSUMED_WRONGLY, _consumed_wrongly(deliveries, copies)),
    ]
    outcomes = Counter(one.outcome for one in sends)
    consumed = {one.body for one in deliveries}
    anywhere = {body for copy in copies for body in _places(copy)}
    return DrillVerdict(
        sent=len(sends),
        acknowledged=outcomes[SendOutcome.ACKNOWLEDGED],
        unknown=outcomes[SendOutcome.UNKNOWN],
        unknown_stored=sum(one.outcome is SendOutcome.UNKNOWN and one.body in anywhere for one in sends),
        refused=outcomes[SendOutcome.REFUSED],
        consumed=len(consumed),
        redelivered=len(deliveries) - len(consumed),
        nodes=tuple(copy.node for copy in copies),
        defects=tuple(_defects(broken)),
        earlier=tuple(copy.node for one in before for copy in one.copies),
    )


def _broken_rules(sends: Sequence[DrillSend], copies: Sequence[NodeCopy]) -> list[tuple[DefectKind, Iterable[str]]]:
    """The rules about what brokers hold."""
    places = {copy.node: _places(copy) for copy in copies}
    anywhere = {body for one in places.values() for body in one}
    return [
        (DefectKind.LOST, _lost(sends, places)),
        (DefectKind.DUPLICATED, _duplicated(places)),
        (DefectKind.OUT_OF_ORDER, _out_of_order(sends)),
        (DefectKind.MOVED, _moved(sends, places)),
        (DefectKind.REFUSED_BUT_STORED, _refused_but_stored(sends, anywhere)),
        (DefectKind.NEVER_SENT, sorted(_text(body) for body in anywhere - {one.body for one in sends})),
        (DefectKind.OFFSETS, _bad_offsets(copies)),
        (DefectKind.NODES_DIFFER, _differing(copies)),
    ]


def _defects(broken: Iterable[tuple[DefectKind, Iterable[str]]]) -> Iterator[Defect]:
    cases: dict[DefectKind, list[str]] = defaultdict(list)
    for kind, found in broken:
        cases[kind] += found
    for kind, mine in cases.items():
        if mine:
            yield Defect(kind, len(mine), tuple(mine[:EXAMPLES_MAX]))


def _places(copy: NodeCopy) -> dict[bytes, list[MessagePlace]]:
    places: dict[bytes, list[MessagePlace]] = defaultdict(list)
    for queue_id, messages in copy.queues.items():
        for one in messages:
            places[one.body].append(MessagePlace(queue_id, one.queue_offset))
    return dict(places)


# --- messages and where they are -------------------------------------------------------------------------------------

_Places = Mapping[NodeId, Mapping[bytes, Sequence[MessagePlace]]]


def _lost(sends: Sequence[DrillSend], places: _Places) -> Iterator[str]:
    for one in _acknowledged(sends):
        missing = [node for node, here in places.items() if one.body not in here]
        if missing or not places:
            where = MessagePlace(one.queue_id, one.queue_offset)
            yield f"number {one.number}, acknowledged at {where}, is not on {', '.join(missing) or 'any node'}"


def _duplicated(places: _Places) -> Iterator[str]:
    found = {
        body: (node, all_) for node, here in sorted(places.items()) for body, all_ in here.items() if len(all_) > 1
    }
    for body, (node, all_) in sorted(found.items()):
        yield f"{_text(body)} is on {node} {len(all_)} times: {'; '.join(map(str, all_))}"


def _moved(sends: Sequence[DrillSend], places: _Places) -> Iterator[str]:
    for one in _acknowledged(sends):
        told = MessagePlace(one.queue_id, one.queue_offset)
        for node, here in places.items():
            if one.body in here and told not in here[one.body]:
                yield f"number {one.number} was acknowledged at {told} but is at {here[one.body][0]} on {node}"
                break


def _out_of_order(sends: Sequence[DrillSend]) -> Iterator[str]:
    """Checks the acknowledged positions; whether the messages are really there is another rule."""
    highest: dict[int, DrillSend] = {}
    for one in _acknowledged(sends):
        before = highest.get(one.queue_id)
        if before is not None and one.queue_offset <= before.queue_offset:
            yield (
                f"queue {one.queue_id}: number {one.number} at offset {one.queue_offset}, "
                f"but number {before.number} before it at {before.queue_offset}"
            )
        else:
            highest[one.queue_id] = one


def _refused_but_stored(sends: Sequence[DrillSend], anywhere: set[bytes]) -> Iterator[str]:
    for one in sends:
        if one.outcome is SendOutcome.REFUSED and one.body in anywhere:
            yield f"number {one.number} was refused ({one.error}) but is stored"


# --- nodes -----------------------------------------------------------------------------------------------------------


def _bad_offsets(copies: Sequence[NodeCopy]) -> Iterator[str]:
    for copy in copies:
        for queue_id, messages in sorted(copy.queues.items()):
            expected = 0
            for one in messages:
                if one.queue_offset != expected:
                    yield f"{copy.node}: queue {queue_id} continues at {one.queue_offset} instead of {expected}"
                expected = one.queue_offset + 1


def _differing(copies: Sequence[NodeCopy]) -> Iterator[str]:
    if not copies:
        return
    first = copies[0]
    for copy in copies[1:]:
        if copy.log != first.log:
            yield f"the log of {copy.node} holds {copy.log}, that of {first.node} {first.log}"
        for queue_id in sorted(first.queues.keys() | copy.queues.keys()):
            mine, other = copy.queues.get(queue_id, ()), first.queues.get(queue_id, ())
            if mine != other:
                same = sum(1 for a, b in zip(mine, other, strict=False) if a == b)
                yield (
                    f"queue {queue_id}: {copy.node} has {len(mine)} records and {first.node} has {len(other)}; "
                    f"{same} are equal"
                )


def _changed(before: Station, after: Station) -> Iterator[str]:
    """Physical offsets may change, and so a record's checksum; queue offsets and bodies may not."""
    for was in before.copies[:1]:
        for now in after.copies:
            for queue_id, messages in sorted(was.queues.items()):
                here = now.queues.get(queue_id, ())
                for one, other in zip_longest(messages, here[: len(messages)]):
                    if other is None or (one.queue_offset, one.body) != (other.queue_offset, other.body):
                        there = "nothing" if other is None else f"{_text(other.body)} at {other.queue_offset}"
                        place = MessagePlace(queue_id, one.queue_offset)
                        yield f"{place}: {was.node} held {_text(one.body)}, {now.node} holds {there}"
                        break


# --- consumers -------------------------------------------------------------------------------------------------------


def _not_consumed(sends: Sequence[DrillSend], deliveries: Sequence[DrillDelivery]) -> Iterator[str]:
    consumed = {one.body for one in deliveries}
    for one in _acknowledged(sends):
        if one.body not in consumed:
            yield f"number {one.number}, at {MessagePlace(one.queue_id, one.queue_offset)}"


def _consumed_wrongly(deliveries: Sequence[DrillDelivery], copies: Sequence[NodeCopy]) -> Iterator[str]:
    stored = {
        MessagePlace(queue_id, one.queue_offset): one.body
        for copy in copies[:1]
        for queue_id, messages in copy.queues.items()
        for one in messages
    }
    expected: dict[tuple[int, int], int] = {}
    for one in deliveries:
        place = MessagePlace(one.queue_id, one.queue_offset)
        if stored.get(place) != one.body:
            yield f"session {one.session} got {_text(one.body)} at {place}, where another message is stored"
        next_offset = expected.get((one.session, one.queue_id), one.queue_offset)
        if one.queue_offset != next_offset:
            yield (
                f"session {one.session}: queue {one.queue_id} continues at {one.queue_offset} instead of {next_offset}"
            )
        expected[one.session, one.queue_id] = one.queue_offset + 1


def _acknowledged(sends: Sequence[DrillSend]) -> Iterator[DrillSend]:
    return (one for one in sends if one.outcome is SendOutcome.ACKNOWLEDGED)


def _text(body: bytes) -> str:
    return body[:40].decode(errors="backslashreplace").rstrip(". ")
