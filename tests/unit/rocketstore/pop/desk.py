"""An engine over tables in memory: what it writes is applied when a test says so."""

from __future__ import annotations

from collections.abc import Sequence

from rocketstore.pop.engine import PopEngine
from rocketstore.pop.operations import (
    CopyResult,
    Leased,
    Loading,
    Origin,
    Pending,
    PopCopy,
    PopDelivery,
    PopFound,
    PopRules,
    PopWish,
    QueueBounds,
    Tick,
    Verdict,
)
from rocketstore.pop.tables import LeaseWindow, PopPlace, PopTables

GROUP, TOPIC, RETRY = "group", "T", "%RETRY%group_T"
QUEUE = PopPlace(GROUP, TOPIC, 0)
RETRIES = PopPlace(GROUP, RETRY, 0)


class Desk:
    """Two queues of a topic and its retry topic; a message's record is the attempt that it says."""

    def __init__(self, *, rules: PopRules | None = None, queues: int = 1) -> None:
        self.tables = PopTables()
        self.offsets: dict[PopPlace, int] = {}
        self.rules = rules or PopRules()
        self.queues: dict[PopPlace, list[int]] = {PopPlace(GROUP, TOPIC, one): [] for one in range(queues)}
        self.dead: list[Origin] = []
        self.origins: list[Origin] = []
        self.copies: list[PopCopy] = []
        self.done: list[Pending] = []
        self.now_ms = 1_000_000
        self.engine = PopEngine(self, lambda _count: 0)

    # -- what the engine sees

    def pop_window(self, place: PopPlace) -> LeaseWindow | None:
        return self.tables.windows.get(place)

    def pop_epoch(self) -> int:
        return self.tables.epoch

    def offset(self, group: str, topic: str, queue_id: int) -> int:
        return self.offsets.get(PopPlace(group, topic, queue_id), -1)

    def pop_rules(self, _group: str) -> PopRules:
        return self.rules

    # -- what tests do

    def send(self, count: int, queue_id: int = 0) -> None:
        self.queues[PopPlace(GROUP, TOPIC, queue_id)] += [1] * count

    def window(self, place: PopPlace = QUEUE) -> LeaseWindow:
        return self.tables.windows[place]

    def loading(self) -> Loading:
        bounds = {
            place.queue_id: QueueBounds(0, 0, len(some)) for place, some in self.queues.items() if place.topic == TOPIC
        }
        retry = 0 if RETRIES in self.queues else None
        return Loading(GROUP, TOPIC, RETRY, bounds, retry, self.origins)

    def load(self) -> None:
        self.engine.load(self.loading(), self.now_ms)
        self.settle()

    def delete_topic(self) -> None:
        """The topic is gone; its retry topic is not."""
        self.tables.delete_topic(TOPIC)
        self.offsets = {place: offset for place, offset in self.offsets.items() if place.topic != TOPIC}

    def begin(self, count: int = 32, *, begin: int = 0, **more: object) -> PopDelivery:
        """A receive, as far as the answer depends on a tick. ``begin``: the first message that has not expired."""
        queue_ids = [one.queue_id for one in self.queues if one.topic == TOPIC]
        wish = PopWish(GROUP, TOPIC, queue_ids, count, 60_000)._replace(**more)  # type: ignore[arg-type]  # fields by name
        delivery = self.engine.begin(wish, self.now_ms)
        while (read := self.engine.next_read(delivery, self.now_ms)) is not None:
            there = self.queues[read.place]
            wanted = [one for one in read.only or range(read.offset, len(there)) if one < len(there)][: read.count_max]
            end = wanted[-1] + 1 if wanted else read.offset
            found = [PopFound(one, there[one]) for one in wanted]
            first = begin if read.place.topic == TOPIC else 0
            self.engine.took(delivery, found, end, self.now_ms, begin=first, end=len(there))
        self.engine.finish(delivery, self.now_ms)
        self.look()
        return delivery

    def receive(self, count: int = 32, *, begin: int = 0, **more: object) -> Sequence[Leased]:
        """A receive that is answered."""
        delivery = self.begin(count, begin=begin, **more)
        self.settle()
        assert delivery.verdict is Verdict.OK
        return delivery.messages

    def ack(self, message: Leased) -> Verdict | None:
        (acked,) = self.engine.ack(GROUP, TOPIC, [message.handle], self.now_ms)
        self.settle()
        return acked.verdict

    def tick(self) -> Tick | None:
        """The next tick, not yet applied."""
        self.now_ms += 5
        return self.engine.take_tick(self.now_ms)

    def apply(self, tick: Tick) -> None:
        """A tick is in the log."""
        for row in tick.rows:
            offset = self.tables.apply(row, self.offsets.get(row.place))
            if offset is not None:
                self.offsets[row.place] = offset

    def settle(self) -> None:
        """Apply what the engine writes, until it writes nothing."""
        while (tick := self.tick()) is not None:
            self.apply(tick)
            self.engine.ticked(tick, None, self.now_ms)
            self.look()
        self.look()

    def look(self) -> None:
        self.done += self.engine.take_done(self.now_ms)
        self.copies += self.engine.take_copies()

    def later(self, ms: int) -> None:
        """Time passes; copies are stored."""
        self.now_ms += ms
        self.engine.expire(self.now_ms)
        self.settle()

    def store_copies(self) -> None:
        """Store the copies that are wanted."""
        copies, self.copies = self.copies, []
        for copy in copies:
            self.store(copy)
            self.engine.copied(copy, CopyResult.STORED, self.now_ms)
        self.load()
        self.settle()

    def store(self, copy: PopCopy) -> None:
        """A copy gets into the log."""
        said = self.queues[copy.origin.place][copy.origin.offset]
        self.origins.append(copy.origin)
        if copy.is_dead(said):
            self.dead.append(copy.origin)
        else:
            self.queues.setdefault(RETRIES, []).append(copy.next_attempt(said))

    def fail_over(self, *, ms: int = 0, load: bool = True) -> None:
        """Another leader."""
        self.engine.close("gone")
        self.copies = []
        self.now_ms += ms
        self.engine = PopEngine(self, lambda _count: 0)
        if load:
            self.load()
