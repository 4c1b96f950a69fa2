"""When the producers of open transactions are asked, and how often each was.

RocketMQ stores a half message again for every check, with its count. Here the log holds only when the last rounds of
checks were, one small message for each round: a transaction has been asked about in every round since it was due. So
the next master counts on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

from dledger.records import record
from rocketstore.broker.transactions.halves import Half

VERSION: Final = 1
ROUNDS_MAX: Final = 1000


@record(frozen=True, slots=True)
class Rounds:
    """The times of the last rounds (ms since 1970), and the position before which every commit has its op."""

    times: tuple[int, ...] = ()
    scanned: int = 0

    def encode(self) -> bytes:
        """As stored."""
        return json.dumps({"version": VERSION, "rounds": self.times, "scanned": self.scanned}).encode()

    def until(self, now_ms: int) -> Rounds:
        """Without those of a clock that was ahead of ours: in no time from now on was anybody asked."""
        return Rounds(tuple(one for one in self.times if one <= now_ms), self.scanned)

    def then(self, now_ms: int, most: int) -> Rounds:
        """With another round, now."""
        return Rounds((*self.times, now_ms)[-most:], self.scanned)


def decode_rounds(body: bytes) -> Rounds:
    """What a broker has stored; nothing if this version cannot read it."""
    try:
        found = json.loads(body)
        if found["version"] != VERSION:
            return Rounds()
        times, scanned = found["rounds"], found["scanned"]
    except (ValueError, TypeError, KeyError):
        return Rounds()
    numbers = [*times, scanned] if isinstance(times, list) else [None]
    if len(numbers) > ROUNDS_MAX + 1 or not all(type(one) is int and one >= 0 for one in numbers):
        return Rounds()
    return Rounds(tuple(times), scanned)


def due_at(half: Half, time_out_ms: int) -> int:
    """From when on (ms since 1970) its producer is asked."""
    return half.stored_ms + (time_out_ms if half.immunity_ms is None else half.immunity_ms)


def times_checked(half: Half, times: Iterable[int], time_out_ms: int) -> int:
    """In how many rounds its producer was asked."""
    due_ms = due_at(half, time_out_ms)
    return half.checked_before + sum(one >= due_ms for one in times)
