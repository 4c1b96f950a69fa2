"""When the producers of open transactions are asked, and how often each was.

RocketMQ stores a half message again for every check, with its count. Here the log holds only when the last rounds of
checks were, one small message for each round, and which producer groups were asked about all that was due. So the next
master counts on. A round in which nobody of a group could be asked does not count: its producers may be down. A
successor does not know which single transactions its predecessor asked about in a round that reached only some: it asks
more often.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import chain
from typing import Final, NamedTuple

from dledger.records import record
from rocketstore.broker.transactions.halves import Half

VERSION: Final = 2
_FIRST_VERSION: Final = 1
"""Its rounds do not say who was asked, so they do not count."""
ROUNDS_MAX: Final = 1000
GROUPS_MAX: Final = 10_000
"""Those of a message; what it does not name is asked more often."""
GROUP_CHARS_MAX: Final = 255


class CheckRound(NamedTuple):
    """When it was (ms since 1970), and the groups that were asked about all that was due."""

    time_ms: int
    groups: frozenset[str]


@record(frozen=True, slots=True)
class Rounds:
    """The last rounds, and the position before which every commit has its op."""

    rounds: tuple[CheckRound, ...] = ()
    scanned: int = 0

    def encode(self) -> bytes:
        """As stored."""
        names = sorted(set(chain.from_iterable(one.groups for one in self.rounds)))[:GROUPS_MAX]
        numbers = {name: number for number, name in enumerate(names)}
        rounds = [
            [time_ms, sorted(numbers[one] for one in groups if one in numbers)] for time_ms, groups in self.rounds
        ]
        return json.dumps({"version": VERSION, "groups": names, "rounds": rounds, "scanned": self.scanned}).encode()

    def until(self, now_ms: int) -> Rounds:
        """Without those of a clock that was ahead of ours: in no time from now on was anybody asked."""
        return Rounds(tuple(one for one in self.rounds if one.time_ms <= now_ms), self.scanned)

    def then(self, now_ms: int, groups: Collection[str], scanned: int, most: int) -> Rounds:
        """With another round, if anybody was asked in it, and another position."""
        named = frozenset(one for one in groups if len(one) <= GROUP_CHARS_MAX)
        rounds = (*self.rounds, CheckRound(now_ms, named)) if named else self.rounds
        return Rounds(rounds[-most:], scanned)


def decode_rounds(body: bytes) -> Rounds:
    """The rounds that a broker has stored; none if this version cannot read them."""
    try:
        found = json.loads(body)
        version, scanned = found["version"], found["scanned"]
        if type(scanned) is not int or scanned < 0:
            return Rounds()
        if version == _FIRST_VERSION:
            return Rounds((), scanned)
        names, rounds = found["groups"], found["rounds"]
        if version != VERSION or len(rounds) > ROUNDS_MAX or not all(type(one) is str for one in names):
            return Rounds()
        numbers = [number for time_ms, groups in rounds for number in (time_ms, *groups)]
        if not all(type(one) is int and one >= 0 for one in numbers):
            return Rounds()
        made = tuple(CheckRound(time_ms, frozenset(names[one] for one in groups)) for time_ms, groups in rounds)
    except (ValueError, TypeError, LookupError):
        return Rounds()
    return Rounds(made, scanned)


def due_at(half: Half, time_out_ms: int) -> int:
    """From when on (ms since 1970) its producer is asked."""
    return half.stored_ms + (time_out_ms if half.immunity_ms is None else half.immunity_ms)


def times_checked(half: Half, before: Rounds, time_out_ms: int) -> int:
    """How often its producer was asked: by earlier masters, in the rounds ``before``, and by this one."""
    due_ms = due_at(half, time_out_ms)
    earlier = sum(one.time_ms >= due_ms and half.group in one.groups for one in before.rounds)
    return half.checked_before + earlier + half.asked
