"""What was promised to a group: nothing skipped, little repeated, no position that goes back, nobody silent."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

from tests.sim_consumer.broker import ModelBroker, Place, Stored

DISTURBED_S: Final = 10.0
"""How long anything that happened to group or broker may be the reason of a repetition."""


class Oracle:
    """Called with the broker's lock, or takes it. ``at`` is a stored message's place in the log, which is unique."""

    def __init__(self, broker: ModelBroker) -> None:
        self.broker = broker
        self.problems: list[str] = []
        self.calls: Counter[bytes] = Counter()
        """How often each message was handed to a handler."""
        self.settled: set[int] = set()
        """What is done, was sent back, or need not be done any more."""
        self.done: dict[bytes, float] = {}
        self.sent: dict[bytes, Place] = {}
        self.excused: set[bytes] = set()
        """Messages that nobody may ever get: deleted, lost, before the group's beginning, or skipped by a reset."""
        self.may_be_given_up: dict[bytes, int] = {}
        """Messages that nobody takes back, and after how many tries they may be skipped."""
        self.may_go_back: set[Place] = set()
        self.disturbed_at = float("-inf")
        self.repeated = 0
        broker.watcher = self

    def wrong(self, problem: str) -> None:
        self.problems.append(problem)

    def disturbed(self) -> None:
        """Something happens that may lead to repetitions."""
        self.disturbed_at = time.monotonic()

    def excuse(self, stored: list[Stored]) -> None:
        """These may be missed from now on."""
        self.settled.update(one.at for one in stored)
        self.excused.update(one.body for one in stored if one.body not in self.done)

    # --- handlers -----------------------------------------------------------------------------------------------------

    def begins(self, body: bytes) -> None:
        with self.broker.changed:
            self.calls[body] += 1
            if body in self.done:
                self.repeated += 1
                if self.disturbed_at < self.done[body] - DISTURBED_S:
                    self.wrong(f"{body!r} comes again although nothing has happened since it was done")

    def ends(self, at: int, body: bytes) -> None:
        """It is done."""
        with self.broker.changed:
            self.settled.add(at)
            self.done[body] = time.monotonic()

    # --- the broker ---------------------------------------------------------------------------------------------------

    def committed(self, group: str, place: Place, offset: int, *, before: int | None, back: bool) -> None:
        """Everything before a position is done; and it does not go back by itself."""
        if before is not None and offset < before and not (back and place in self.may_go_back):
            self.wrong(f"the position in {place} goes back from {before} to {offset}")
        queue = self.broker.queues.get(place)
        if queue is None:
            return
        if offset > queue.end and place not in self.may_go_back:
            self.wrong(f"the position in {place} is {offset}, behind its end at {queue.end}")
        missed = [one for one in queue.stored if one.offset < offset and one.at not in self.settled]
        for one in missed:
            self.settled.add(one.at)
            if 0 < self.may_be_given_up.get(one.body, 0) <= self.calls[one.body]:
                self.excused.add(one.body)
                continue
            self.wrong(f"{one.body!r}, {one.offset} of {place}, is skipped: group {group} has committed {offset}")

    def sent_back(self, one: Stored, *, dead: bool) -> None:
        """It is in the retry topic, which is consumed as any other."""
        self.settled.add(one.at)
        if dead:
            self.done.setdefault(one.body, time.monotonic())

    # --- the end ------------------------------------------------------------------------------------------------------

    def left(self) -> list[bytes]:
        """What is still to come."""
        with self.broker.changed:
            return [one for one in self.sent if one not in self.done and one not in self.excused]
