"""A broker as a consumer sees it: topics, queues, positions, members, locks, retries. No network, no disk."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from rocketstore.message.message import Message
from rocketstore.message.record import encode_record

Place = tuple[str, int]
"""A topic and a queue of it."""
READ: Final = 4
_NOT_YET: Final = ("OFFSET_OVERFLOW_ONE", "NO_MESSAGE_IN_QUEUE")


class RefusedError(Exception):
    """Why a request is not carried out: ``unavailable``, ``not_found``, ``not_allowed`` or ``invalid``."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Stored(NamedTuple):
    """A message in a queue. ``body`` names it; its copies in the retry topic have the same."""

    body: bytes
    offset: int
    at: int
    stored_ms: int
    record: bytes
    tries: int


@dataclass
class ModelQueue:
    """What is left of a queue: offsets from ``base`` on."""

    base: int = 0
    stored: list[Stored] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.base + len(self.stored)

    def since(self, offset: int) -> list[Stored]:
        return self.stored[max(offset - self.base, 0) :]


@dataclass
class Topic:
    """How many of its queues may be read, if at all."""

    queues: int
    permission: int = 6


class Watcher(Protocol):
    """Whoever checks what happens; called with the lock."""

    def committed(self, group: str, place: Place, offset: int, *, before: int | None, back: bool) -> None:
        """A position is stored."""

    def sent_back(self, one: Stored, *, dead: bool) -> None:
        """A message waits in the retry topic, or among the dead."""


class Pulled(NamedTuple):
    """What the answer to a pull says."""

    status: str
    records: Sequence[bytes]
    next_offset: int
    min_offset: int
    max_offset: int


class ModelBroker:
    """Thread-safe. Every request raises ``RefusedError`` if it is refused."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())  # guards everything
        self.topics: dict[str, Topic] = {}
        self.queues: dict[Place, ModelQueue] = {}
        self.offsets: dict[tuple[str, str, int], int] = {}
        self.committed: dict[tuple[str, str, int], list[int]] = {}
        """Every position there was since the last reset, the last one last."""
        self.members: dict[str, list[str]] = {}
        self.locks: dict[Place, str] = {}
        self.dead: list[Stored] = []
        self.is_down = False
        self.starts = 1
        """How often it was started: its incarnation. No connection outlives that."""
        self.takes_back = "yes"
        """Whether it takes messages back: ``yes``, ``later`` (no room for a retry topic), or ``never``."""
        self.at_commits: deque[Callable[[], None]] = deque()
        """What happens during the next commits: before they are stored, or instead of their answers."""
        self.after_commits: deque[Callable[[], None]] = deque()
        self.watcher: Watcher | None = None
        self._log: dict[int, tuple[Place, Stored]] = {}
        self._at = 0
        self._now_ms = 1_700_000_000_000

    # --- what administrators and producers do -------------------------------------------------------------------------

    def put_topic(self, name: str, queues: int, permission: int = 6) -> None:
        with self.changed:
            self.topics[name] = Topic(queues, permission)
            self.changed.notify_all()

    def delete_topic(self, name: str) -> None:
        """With its messages and all positions in it; one made anew goes on with its queues' offsets."""
        with self.changed:
            self.topics.pop(name, None)
            for (topic, queue_id), queue in self.queues.items():
                if topic == name:
                    self.queues[topic, queue_id] = ModelQueue(queue.end)
            self.offsets = {key: offset for key, offset in self.offsets.items() if key[1] != name}
            self.committed = {key: found for key, found in self.committed.items() if key[1] != name}
            self.changed.notify_all()

    def delete_group(self, name: str) -> None:
        with self.changed:
            self.offsets = {key: offset for key, offset in self.offsets.items() if key[0] != name}
            self.committed = {key: found for key, found in self.committed.items() if key[0] != name}

    def lose_everything(self) -> None:
        """The disk is another one. Topics are made anew at once, as a producer's first message does it."""
        with self.changed:
            self.queues.clear()
            self.offsets.clear()
            self.committed.clear()
            self.locks.clear()
            self._log.clear()
            for name in [one for one in self.topics if one.startswith("%")]:
                del self.topics[name]
            self.changed.notify_all()

    def lose_end(self, place: Place, count: int, *, commits: int = 0) -> list[Stored]:
        """Its last messages were never flushed, nor the last ``commits``; no position is beyond what is left."""
        with self.changed:
            queue = self.queues.get(place, ModelQueue())
            lost = queue.stored[max(len(queue.stored) - count, 0) :]
            del queue.stored[len(queue.stored) - len(lost) :]
            for key in [one for one in self.offsets if one[1:] == place]:
                found = self.committed.setdefault(key, [self.offsets[key]])
                del found[max(len(found) - commits, 0) :]
                if found:
                    self.offsets[key] = min(found[-1], queue.end)
                else:
                    del self.offsets[key]
            return lost

    def set_down(self, *, down: bool) -> None:
        with self.changed:
            self.is_down = down
            if down:
                self.starts += 1
                self.members.clear()
                self.locks.clear()
            self.changed.notify_all()

    def send(self, topic: str, queue_id: int, body: bytes, tries: int = 0, origin: str = "", tags: str = "") -> Stored:
        with self.changed:
            queue = self.queues.setdefault((topic, queue_id), ModelQueue())
            self._now_ms += 1
            properties = {"RETRY_TOPIC": origin} if origin else {}
            if tags:
                properties["TAGS"] = tags
            message = Message(
                topic, body, queue_id, properties, store_timestamp=self._now_ms, offset=self._at, reconsume_times=tries
            )
            record = encode_record(message, queue_offset=queue.end, physical_offset=self._at)
            one = Stored(body, queue.end, self._at, self._now_ms, record, tries)
            queue.stored.append(one)
            self._log[self._at] = ((topic, queue_id), one)
            self._at += len(record)
            self.changed.notify_all()
            return one

    def reset(self, group: str, place: Place, offset: int) -> None:
        with self.changed:
            self.offsets[group, *place] = offset
            self.committed[group, *place] = [offset]

    # --- what consumers ask -------------------------------------------------------------------------------------------

    def check_up(self) -> None:
        if self.is_down:
            raise RefusedError("unavailable", "the broker is down")

    def _readable(self, place: Place) -> ModelQueue:
        topic = self.topics.get(place[0])
        if topic is None:
            raise RefusedError("not_found", f"topic {place[0]} does not exist")
        if not topic.permission & READ:
            raise RefusedError("not_allowed", f"topic {place[0]} does not allow reads")
        if place[1] >= topic.queues:
            raise RefusedError("not_allowed", f"there is no queue {place[1]} of {place[0]}")
        return self.queues.setdefault(place, ModelQueue())

    def pull(
        self, place: Place, offset: int, *, count: int, wait_s: float, goes_on: Callable[[], bool] = lambda: True
    ) -> Pulled:
        """Waits for a message, but not longer than ``wait_s``."""
        until = time.monotonic() + wait_s
        with self.changed:
            while True:
                self.check_up()
                answer = self._pull(self._readable(place), offset, count)
                left = until - time.monotonic()
                if answer.status not in _NOT_YET or left <= 0 or not goes_on():
                    return answer
                self.changed.wait(left)

    @staticmethod
    def _pull(queue: ModelQueue, offset: int, count: int) -> Pulled:
        found = queue.since(offset)[:count] if offset >= queue.base else []
        if found:
            status = "FOUND"
        elif offset < queue.base:
            return Pulled("OFFSET_TOO_SMALL", (), queue.base, queue.base, queue.end)
        elif offset > queue.end:
            return Pulled("OFFSET_OVERFLOW_BADLY", (), queue.end, queue.base, queue.end)
        else:
            status = "OFFSET_OVERFLOW_ONE" if queue.end else "NO_MESSAGE_IN_QUEUE"
        return Pulled(status, [one.record for one in found], offset + len(found), queue.base, queue.end)

    def range_of(self, place: Place) -> tuple[int, int]:
        """Its first offset, and the one behind its last."""
        with self.changed:
            self.check_up()
            queue = self._readable(place)
            return queue.base, queue.end

    def offset_at(self, place: Place, time_ms: int) -> int:
        with self.changed:
            self.check_up()
            queue = self._readable(place)
            return next((one.offset for one in queue.stored if one.stored_ms >= time_ms), queue.end)

    def positions(self, group: str, topic: str) -> dict[int, int]:
        with self.changed:
            self.check_up()
            return {key[2]: offset for key, offset in self.offsets.items() if key[:2] == (group, topic)}

    def commit(self, group: str, topic: str, offsets: dict[int, int], *, back: bool, incarnation: int = 0) -> None:
        """Whether they may go ``back``; else none does. None is stored by another ``incarnation`` than that."""
        self._happen(self.at_commits)
        with self.changed:
            self.check_up()
            if incarnation not in (0, self.starts):
                return
            if topic not in self.topics:
                raise RefusedError("not_found", f"topic {topic} does not exist")
            for queue_id, offset in offsets.items():
                before = self.offsets.get((group, topic, queue_id))
                stored = offset if back or before is None else max(offset, before)
                self.offsets[group, topic, queue_id] = stored
                self.committed.setdefault((group, topic, queue_id), []).append(stored)
                if self.watcher is not None:
                    self.watcher.committed(group, (topic, queue_id), stored, before=before, back=back)
        self._happen(self.after_commits)

    @staticmethod
    def _happen(events: deque[Callable[[], None]]) -> None:
        try:
            event = events.popleft()
        except IndexError:
            return
        event()

    # --- groups -------------------------------------------------------------------------------------------------------

    def join(self, group: str, client_id: str) -> None:
        with self.changed:
            self.check_up()
            members = self.members.setdefault(group, [])
            if client_id not in members:
                members.append(client_id)
            if self.takes_back != "later":
                self.topics.setdefault(f"%RETRY%{group}", Topic(1))
            self.changed.notify_all()

    def leave(self, group: str, client_id: str) -> None:
        with self.changed:
            if client_id in self.members.get(group, []):
                self.members[group].remove(client_id)
            self.locks = {place: owner for place, owner in self.locks.items() if owner != client_id}
            self.changed.notify_all()

    def lock(self, client_id: str, places: Collection[Place]) -> list[Place]:
        """Those that are this member's now."""
        with self.changed:
            self.check_up()
            return [one for one in places if self.locks.setdefault(one, client_id) == client_id]

    def unlock(self, client_id: str, places: Collection[Place]) -> None:
        with self.changed:
            self.check_up()
            for one in places:
                if self.locks.get(one) == client_id:
                    del self.locks[one]

    def tries_of(self, at: int) -> int:
        """How often this message was sent back before."""
        with self.changed:
            found = self._log.get(at)
            return 0 if found is None else found[1].tries

    def send_back(self, group: str, at: int, *, dead: bool) -> None:
        with self.changed:
            self.check_up()
            if self.takes_back == "later":
                raise RefusedError("unavailable", "topic[%RETRY%] not exist: queues_max")
            if self.takes_back == "never":
                raise RefusedError("invalid", "the properties take 32771 bytes; at most 32767 fit")
            found = self._log.get(at)
            if found is None:
                raise RefusedError("not_found", "look message by offset failed")
            place, one = found
            if dead:
                self.dead.append(one)
            else:
                self.topics.setdefault(f"%RETRY%{group}", Topic(1))
                self.send(f"%RETRY%{group}", 0, one.body, one.tries + 1, origin=place[0])
            if self.watcher is not None:
                self.watcher.sent_back(one, dead=dead)
