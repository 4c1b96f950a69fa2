"""Measures the time from a push to its acknowledgement. Decides nothing.

One answer may acknowledge several pushes, so each push is remembered until an index at or above its last one is
acknowledged. Pushes on a broken connection are forgotten.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from dledger.core.messages import PushAppend, PushKind, PushResponse
from dledger.errors import ResponseCode
from dledger.instruments import Instruments
from dledger.types import LogIndex, NodeId, Term

REMEMBERED_MAX: Final = 256
"""Pushes per peer; more than any window, so that only pushes that will not be answered are dropped."""


@dataclass(frozen=True, slots=True)
class _Sent:
    term: Term
    last_index: LogIndex
    entries: int
    size_bytes: int
    at_s: float


class PushTimes:
    """The times of one leader. ``sent`` and ``answered`` of a peer may run at once, each on one thread at a time."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        self._sent: dict[NodeId, deque[_Sent]] = {}

    def sent(self, peer: NodeId, push: PushAppend) -> None:
        """Record a push being sent."""
        run = push.run
        entries = run.last_index - run.first_index + 1
        waiting = self._sent.get(peer)
        if waiting is None:
            waiting = self._sent.setdefault(peer, deque(maxlen=REMEMBERED_MAX))
        waiting.append(_Sent(push.term, run.last_index, entries, len(run.data), time.monotonic()))

    def answered(self, peer: NodeId, answer: PushResponse) -> None:
        """Record a follower's answer."""
        if answer.kind is not PushKind.APPEND or answer.code is not ResponseCode.SUCCESS:
            return
        waiting = self._sent.get(peer)
        while waiting and waiting[0].last_index <= answer.flushed_index:
            push = waiting.popleft()
            if push.term == answer.term:
                took_s = time.monotonic() - push.at_s
                self._instruments.push_acknowledged(peer, push.entries, push.size_bytes, took_s)

    def lost(self, peer: NodeId) -> None:
        """The connection broke: forget the pushes in flight."""
        self._sent.pop(peer, None)
