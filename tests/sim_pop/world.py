"""One world: a log, members that lead one after the other, their clocks, and consumers.

The log is a list of entries of which a prefix is committed. Only the newest leader's entries ever become so; those of
its predecessor that are not may or may not be in the log that it continues. A leader that was replaced goes on with
what it knew then, for as long as it is asked.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from rocketstore.pop.engine import AUTO_RENEW_MS_MAX, PopEngine
from rocketstore.pop.operations import (
    CopyResult,
    Loading,
    Origin,
    Pending,
    PopCopy,
    PopDelivery,
    PopFound,
    PopRules,
    PopWish,
    QueueBounds,
    Verdict,
)
from rocketstore.pop.tables import LeaseWindow, PopPlace, PopRow, PopTables, check_row, row_from_json, row_json
from rocketstore.pop.windows import COPIES_MAX, NotLoadedError
from tests.sim_pop.oracle import BrokenRuleError, Oracle, Sent, Told

GROUP: Final = "g"
TOPIC: Final = "T"
RETRY: Final = "%RETRY%g_T"
RETRIES: Final = PopPlace(GROUP, RETRY, 0)
SKEW_MS: Final = 500
"""Of each member, to either side."""
ROUNDS_MAX: Final = 4000
"""At the end, until everything is consumed."""
LEASE_MS: Final = 60_000


@dataclass(slots=True)
class Record:
    """A message as it is stored; ``attempt``: its reconsume times + 1."""

    sent: Sent | None
    """None while it is not in the log."""
    attempt: int = 1
    origin: Origin | None = None


@dataclass(slots=True)
class Entry:
    """``apply`` when it is committed; then ``told`` to the leader that wrote it, if it still leads."""

    apply: Callable[[], None]
    told: Callable[[], None]
    leader: Leader


class View:
    """The tables as one leader sees them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.tables = world.tables
        self.offsets = world.offsets
        self.ends: dict[PopPlace, int] | None = None

    def freeze(self) -> None:
        """It hears of nothing any more."""
        self.tables, self.offsets = self.tables.copy(), dict(self.offsets)
        self.ends = {place: len(queue) for place, queue in self._world.queues.items()}

    def end(self, place: PopPlace) -> int:
        """The next offset of a queue."""
        if self.ends is not None:
            return self.ends.get(place, 0)
        return len(self._world.queues.get(place, ()))

    def pop_window(self, place: PopPlace) -> LeaseWindow | None:
        """See ``PopView``."""
        return self.tables.windows.get(place)

    def pop_epoch(self) -> int:
        """See ``PopView``."""
        return self.tables.epoch

    def offset(self, group: str, topic: str, queue_id: int) -> int:
        """See ``PopView``."""
        return self.offsets.get(PopPlace(group, topic, queue_id), -1)

    def pop_rules(self, _group: str) -> PopRules:
        """See ``PopView``."""
        return self._world.rules


class Leader:
    """The side that drives an engine: it does what the engine's docstring says, at once."""

    def __init__(self, world: World, number: int, skew_ms: int) -> None:
        self.world = world
        self.number = number
        self.skew_ms = skew_ms
        self.is_deposed = False
        self.view = View(world)
        self.engine = PopEngine(self.view, world.random.randrange)
        self.answers: dict[int, tuple[Pending, Callable[[], None]]] = {}
        self.has_retries = False
        """Whether the retry topic is loaded."""

    @property
    def now_ms(self) -> int:
        """By its clock."""
        return self.world.now_ms + self.skew_ms

    def look(self) -> None:
        """After every call."""
        if (due_ms := self.engine.due_ms()) is not None and due_ms <= self.now_ms:
            self.engine.expire(self.now_ms)
        for copy in self.engine.take_copies():
            self.world.copy(self, copy)
        self.engine.take_woken()
        tick = self.engine.take_tick(self.now_ms)
        if tick is not None:
            self.world.write_tick(self, tick.rows, lambda failure: self._ticked(tick, failure))
        for one in self.engine.take_done(self.now_ms):
            _, answer = self.answers.pop(id(one), (one, lambda: None))
            answer()

    def _ticked(self, tick: object, failure: object) -> None:
        self.engine.ticked(tick, failure, self.now_ms)  # type: ignore[arg-type]  # it is what take_tick gave
        self.look()

    def when_done(self, operation: Pending, answer: Callable[[], None]) -> None:
        """Call ``answer`` once the operation is done."""
        self.answers[id(operation)] = operation, answer
        self.look()

    def load(self) -> None:
        """Take the topic up."""
        world, view = self.world, self.view
        bounds = {
            one: QueueBounds(0, world.begins_at_end * (end := view.end(PopPlace(GROUP, TOPIC, one))), end)
            for one in range(world.queue_count)
        }
        ends = view.ends or {}
        end = ends.get(RETRIES, len(world.queues.get(RETRIES, ())))
        copies = world.queues.get(RETRIES, [])[:end][-COPIES_MAX:]
        dead = world.dead[-COPIES_MAX:]
        origins = [one.origin for one in (*copies, *dead) if one.origin is not None]
        retry = world.begins.get(RETRIES, 0) if RETRIES in world.queues else None
        self.has_retries = retry is not None
        loaded = self.engine.load(Loading(GROUP, TOPIC, RETRY, bounds, retry, origins), self.now_ms)
        self.when_done(loaded, lambda: None)

    def begin(self, wish: PopWish) -> PopDelivery | None:
        """A receive, read and finished; None while the topic is loaded."""
        try:
            delivery = self.engine.begin(wish, self.now_ms)
        except NotLoadedError:
            self.load()
            return None
        while (read := self.engine.next_read(delivery, self.now_ms)) is not None:
            queue = self.world.queues.get(read.place, [])[: self.view.end(read.place)]
            begin = self.world.begins.get(read.place, 0)
            there = [
                one for one in read.only or range(max(read.offset, begin), len(queue)) if begin <= one < len(queue)
            ]
            found, end = [], max(read.offset, begin)
            for offset in there:
                record = queue[offset]
                end = offset + 1
                if record.sent is not None and record.sent.wanted:
                    found.append(PopFound(offset, record.attempt))
                if len(found) == read.count_max or self.world.random.random() < self.world.stop_share:
                    break
            if read.only:
                found = [PopFound(o, queue[o].attempt) for o in there if (s := queue[o].sent) is not None and s.wanted]
            for one in found:
                queue[one.offset].sent.leases += 1  # type: ignore[union-attr]  # it is set
            self.engine.took(delivery, found, end, self.now_ms, begin=begin, end=len(queue))
        self.engine.finish(delivery, self.now_ms)
        return delivery


@dataclass(slots=True, eq=False)
class Client:
    """A consumer, and what it remembers of its deliveries."""

    name: str
    auto_renew: bool
    invisible_ms: int
    batch: int
    attempt: int = 0
    asked: tuple[int, int] = (-1, 0)
    """An attempt, and when it was first asked for (ms)."""
    ends: int = 0
    """How often it has gone; it always comes back."""
    held: list[tuple[Sent, Told, str]] = field(default_factory=list)


class World:
    """See the module."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random
        self.now_ms = 1_700_000_000_000
        ordered = choose.random() < 0.35
        attempts_max = choose.choice((0, 2, 3, 17))
        self.rules = PopRules(ordered, attempts_max)
        self.oracle = Oracle(ordered=ordered, attempts_max=attempts_max)
        self.queue_count = choose.choice((1, 1, 2, 3))
        self.wanted_share = choose.choice((1.0, 1.0, 0.7, 0.2))
        self.lost_share = choose.choice((0.0, 0.1, 0.3))
        self.refused_share = choose.choice((0.0, 0.05, 0.2))
        self.stop_share = choose.choice((0.0, 0.1))
        self.resets = choose.random() < 0.1
        self.expires = choose.random() < 0.15
        self.switches = choose.random() < 0.05
        self.oracle.ordered &= not self.switches
        self.oracle.switches = self.switches
        self.failover_weight = choose.choice((0, 2, 6, 15))
        self.tables = PopTables()
        self.offsets: dict[PopPlace, int] = {}
        self.queues: dict[PopPlace, list[Record]] = {}
        self.dead: list[Record] = []
        self.begins: dict[PopPlace, int] = {}
        self.log: list[Entry] = []
        self.places = [PopPlace(GROUP, TOPIC, one) for one in range(self.queue_count)]
        for place in self.places:
            self.queues[place] = []
        self.skews = [choose.randint(-SKEW_MS, SKEW_MS) for _ in range(3)]
        self.leaders = 0
        self.leader = self._new_leader()
        self.deposed: list[Leader] = []
        self.clients = [self._client(one) for one in range(choose.randint(1, 4))]
        self.healed = False
        self.begins_at_end = choose.random() < 0.5
        self.is_answered = False
        """Whether a receive ever was, also with nothing."""
        self.story: list[str] = []

    def _client(self, number: int) -> Client:
        choose = self.random
        auto = choose.random() < 0.3
        invisible_ms = choose.choice((1_000, 5_000, 30_000, LEASE_MS, 90_000, 3_600_000))
        return Client(f"c{number}", auto, LEASE_MS if auto else invisible_ms, choose.choice((1, 2, 5, 32)))

    def _new_leader(self) -> Leader:
        self.leaders += 1
        return Leader(self, self.leaders, self.random.choice(self.skews))

    def tell(self, what: str) -> None:
        """A line of the story that a failure tells."""
        self.story.append(f"{self.now_ms - 1_700_000_000_000:>8} {what}")

    # -- the log -------------------------------------------------------------------------------------------------------

    def append(self, leader: Leader, apply: Callable[[], None], told: Callable[[], None]) -> None:
        """A leader writes an entry; a deposed one writes in vain."""
        if leader is self.leader:
            self.log.append(Entry(apply, told, leader))

    def commit(self, count: int) -> None:
        """Some of the newest leader's entries are committed, and it hears of it."""
        for _ in range(min(count, len(self.log))):
            entry = self.log.pop(0)
            entry.apply()
            if entry.leader is self.leader:
                entry.told()

    def write_tick(self, leader: Leader, rows: Sequence[PopRow], ticked: Callable[[object], None]) -> None:
        """As the journal's change, encoded and decoded."""
        for row in rows:
            check_row(row)
        written = [row_from_json(_through_json(row_json(row))) for row in rows]
        if not self.healed and self.random.random() < self.refused_share:
            if self.random.random() < 0.5:
                self.tell("a tick is refused")
                ticked("refused")
                return
            self.tell("a tick has no known outcome")
            self.append(leader, partial(self._apply, written), lambda: None)
            ticked("unknown")
            return
        self.append(leader, partial(self._apply, written), partial(ticked, None))

    def _apply(self, rows: Sequence[PopRow]) -> None:
        for row in rows:
            is_new = row.place not in self.offsets
            offset = self.tables.apply(row, self.offsets.get(row.place))
            if offset is not None:
                if is_new and not self.is_answered:  # later on, the group has begun (P9)
                    for record in self.queues.get(row.place, [])[: row.opens_at]:
                        assert record.sent is not None
                        record.sent.may_be_gone = True
                self.offsets[row.place] = offset

    def copy(self, leader: Leader, copy: PopCopy) -> None:
        """Store a message again."""
        place, offset, _ = copy.origin
        if offset < self.begins.get(place, 0):
            leader.engine.copied(copy, CopyResult.GONE, leader.now_ms)
            return
        if not self.healed and self.random.random() < self.refused_share:
            leader.engine.copied(copy, CopyResult.NOT_STORED, leader.now_ms)
            return
        record = self.queues[place][offset]
        assert record.sent is not None
        again = Record(record.sent, copy.next_attempt(record.attempt), copy.origin)
        is_dead = copy.is_dead(record.attempt)
        self.tell(f"leader {leader.number} copies {record.sent.number} {'dead' if is_dead else 'again'}")

        def apply() -> None:
            if is_dead:
                self.dead.append(again)
                self.oracle.dead(again.sent)  # type: ignore[arg-type]  # it is set
            else:
                self.queues.setdefault(RETRIES, []).append(again)

        def told() -> None:
            leader.engine.copied(copy, CopyResult.STORED, leader.now_ms)
            if not is_dead and not leader.has_retries:
                leader.load()
            leader.look()

        self.append(leader, apply, told)

    # -- what happens --------------------------------------------------------------------------------------------------

    def play(self, steps: int) -> None:
        """Everything at random, then a quiet end. Raises ``BrokenRuleError``."""
        actions = [
            (self.send, 10),
            (self.receive, 14),
            (self.ack, 14),
            (self.change, 5),
            (self.dead_letter, 1),
            (self.client_gone, 1),
            (self.pass_time, 14),
            (lambda: self.commit(self.random.randint(1, 6)), 20),
            (self.fail_over, self.failover_weight),
            (self.reset, 1 if self.resets else 0),
            (self.expire, 2 if self.expires else 0),
            (self.reorder, 1 if self.switches else 0),
        ]
        self.send()
        for action in self.random.choices([one for one, _ in actions], [weight for _, weight in actions], k=steps):
            action()
        self.end()

    def send(self) -> None:
        """Producers send some messages."""
        place = self.random.choice(self.places)
        for _ in range(self.random.choice((1, 1, 2, 5, 40))):
            wanted = self.random.random() < self.wanted_share

            def apply(wanted: bool = wanted) -> None:
                queue = self.queues[place]
                queue.append(Record(self.oracle.new(place, len(queue), wanted=wanted)))

            self.append(self.leader, apply, lambda: None)

    def receive(self, client: Client | None = None) -> None:
        """A consumer asks for messages."""
        leader = self._asked()
        client = client or self.random.choice(self.clients)
        attempt_id = f"{client.name}-{client.attempt}" if self.random.random() < 0.8 or self.healed else ""
        wish = PopWish(
            GROUP,
            TOPIC,
            range(self.queue_count)
            if self.random.random() < 0.7 or self.healed
            else [self.random.randrange(self.queue_count)],
            client.batch,
            client.invisible_ms,
            client.name,
            attempt_id,
            client.auto_renew,
        )
        delivery = leader.begin(wish)
        if delivery is None:
            return
        asked, ends = client.attempt, client.ends
        if client.asked[0] != asked:
            client.asked = (asked, self.now_ms)
        kept_until_ms = client.asked[1] + AUTO_RENEW_MS_MAX - LEASE_MS

        def answer() -> None:
            if delivery.verdict is Verdict.OK:
                self.is_answered = True
            if delivery.verdict is not Verdict.OK or not delivery.messages:
                return
            if not self.healed and self.random.random() < self.lost_share:
                self.tell(f"{client.name} does not get an answer of leader {leader.number}")
                if self.random.random() < 0.5:
                    leader.engine.cancel(delivery, leader.now_ms)
                    leader.look()
                return
            if client.attempt == asked:
                client.attempt += 1
            batch = []
            for one in delivery.messages:
                sent = self.queues[one.place][one.offset].sent
                assert sent is not None
                end_ms = one.visible_at_ms - leader.skew_ms
                is_kept = client.auto_renew and ends == client.ends
                told = Told(one.handle, leader.number, client.name, end_ms, is_kept, is_kept, one.attempt)
                told.was_prolonged, told.kept_until_ms = client.auto_renew, kept_until_ms
                if sent.deliveries and sent.deliveries[-1].handle == one.handle:
                    told = sent.deliveries[-1]
                batch.append((sent, told))
                client.held.append((sent, told, one.handle))
            self.tell(f"leader {leader.number} tells {client.name}: {[one.number for one, _ in batch]}")
            self.oracle.batch(self.now_ms, batch)

        leader.when_done(delivery, answer)

    def _asked(self) -> Leader:
        return self.random.choice(self.deposed) if self.deposed and self.random.random() < 0.15 else self.leader

    def _held(self) -> tuple[Client, Sent, Told, str] | None:
        client = self.random.choice(self.clients)
        if not client.held:
            return None
        at = self.random.randrange(len(client.held)) if self.random.random() < 0.5 else -1
        sent, told, handle = client.held[at]
        if self.random.random() < 0.8:
            del client.held[at]
        return client, sent, told, handle

    def ack(self) -> None:
        """A consumer acknowledges some of what it has, or had."""
        for _ in range(self.random.choice((1, 1, 3, 8))):
            held = self._held()
            if held is not None:
                self._ack(self._asked(), *held[1:])

    def _ack(self, leader: Leader, sent: Sent, told: Told, handle: str) -> None:
        try:
            (operation,) = leader.engine.ack(GROUP, TOPIC, [handle], leader.now_ms)
        except NotLoadedError:
            leader.load()
            return
        sent.acks_open += 1
        resets = sent.resets

        def answer() -> None:
            if operation.verdict is Verdict.OK:
                self.tell(f"leader {leader.number} acks {sent.number}")
                self.oracle.acked(self.now_ms, sent, told, handle, leader.number)
            elif operation.verdict is Verdict.INVALID_HANDLE:
                sent.acks_open -= sent.resets == resets
                self.oracle.refused(sent, told, handle, self.now_ms)

        leader.when_done(operation, answer)

    def change(self) -> None:
        """A consumer gives a message back, or keeps it longer."""
        held = self._held()
        if held is None:
            return
        client, sent, told, handle = held
        leader = self._asked()
        duration_ms = self.random.choice((0, 1_000, 20_000, LEASE_MS, 120_000, 7_200_000))
        suspend = self.random.random() < 0.3
        try:
            operation = leader.engine.change(GROUP, TOPIC, handle, duration_ms, leader.now_ms, suspend=suspend)
        except NotLoadedError:
            leader.load()
            return
        told.end_ms = min(told.end_ms, self.now_ms + duration_ms)  # as soon as it is asked, it may be so
        told.is_prolonged = False
        told.changes_open += 1

        def answer() -> None:
            if operation.verdict is not Verdict.FAILED:
                told.changes_open -= 1
            if operation.verdict is not Verdict.OK:
                return
            if self.random.random() < self.lost_share:
                told.changes_open += 1  # the consumer does not know that its handle is an old one
                return
            self.tell(f"leader {leader.number} changes {sent.number} by {duration_ms}")
            if operation.visible_at_ms - leader.skew_ms <= self.now_ms:
                return  # it is over already: it may have been given out again
            self.oracle.changed(self.now_ms, sent, told, handle, leader.number)
            told.handle, told.leader = operation.handle, leader.number
            told.end_ms = operation.visible_at_ms - leader.skew_ms if not told.changes_open else self.now_ms
            client.held.append((sent, told, operation.handle))

        leader.when_done(operation, answer)

    def dead_letter(self) -> None:
        """A consumer gives a message up."""
        held = self._held()
        if held is None:
            return
        _, sent, _told, handle = held
        leader = self._asked()
        try:
            operation = leader.engine.dead_letter(GROUP, TOPIC, handle, leader.now_ms)
        except NotLoadedError:
            leader.load()
            return
        sent.may_be_dead = True

        def answer() -> None:
            if operation.verdict is Verdict.OK and not (sent.is_dead or sent.may_be_gone):
                raise BrokenRuleError(f"message {sent.number} is told to be a dead letter, and is none")

        leader.when_done(operation, answer)

    def client_gone(self) -> None:
        """A consumer ends."""
        client = self.random.choice(self.clients)
        self._forget(client)

    def _forget(self, client: Client) -> None:
        client.ends += 1
        self.leader.engine.client_gone(client.name, self.leader.now_ms)
        for sent in self.oracle.sent:
            for told in sent.deliveries[-1:]:
                if told.client == client.name and told.was_prolonged:
                    told.end_ms, told.is_prolonged = min(told.end_ms, self.now_ms), False
        self.leader.look()

    def pass_time(self) -> None:
        """Time passes, and what is due is done."""
        choose = self.random
        ms = choose.choice((5, 5, 5, 50, 500, 1_000, 5_000, choose.randint(10_000, 65_000)))
        self.now_ms += ms if choose.random() < 0.99 else 7_300_000
        for leader in (self.leader, *self.deposed):
            leader.look()

    def fail_over(self) -> None:
        """Another member leads; some of what its predecessor wrote is in its log."""
        old, kept = self.leader, self.random.randint(0, len(self.log))
        old.view.freeze()
        self.tell(f"leader {old.number} is followed by {self.leaders + 1}; {kept} of {len(self.log)} entries stay")
        for entry in self.log[:kept]:
            entry.apply()
        self.log = []
        self.deposed = [*self.deposed, old][-2:]
        self.leader = self._new_leader()

    def reset(self) -> None:
        """An administrator resets the offset of a queue."""
        place = self.random.choice(self.places)
        end = len(self.queues[place])
        target = self.random.randint(0, end)

        def apply() -> None:
            self.tell(f"{place.queue_id} is reset to {target}")
            self.offsets[place] = self.tables.moved(place, target, reset=True)
            for sent in self.oracle.sent:
                if sent.place == place:
                    sent.may_repeat = True
                    sent.may_be_gone = sent.may_be_gone or sent.offset < target
                    if sent.offset >= target:
                        sent.acks_open, sent.resets = 0, sent.resets + 1

        self.append(self.leader, apply, lambda: None)

    def expire(self) -> None:
        """The log forgets the oldest messages of a queue."""
        place = self.random.choice([*self.places, RETRIES])
        queue = self.queues.get(place, [])
        begin = max(self.begins.get(place, 0), self.random.randint(0, len(queue)))
        self.tell(f"{place.topic}-{place.queue_id} begins at {begin}")
        self.begins[place] = begin
        for record in queue[:begin]:
            if record.sent is not None:
                record.sent.may_be_gone = True

    def reorder(self) -> None:
        """Somebody changes whether the group is ordered."""
        self.tell("the group's order changes")
        self.rules = self.rules._replace(ordered=not self.rules.ordered)

    # -- the end -------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Nothing fails any more, and every consumer consumes: in the end, everything is."""
        self.healed = True
        self.deposed = []
        self.commit(len(self.log))
        for client in self.clients:
            client.held = []
            client.auto_renew, client.invisible_ms, client.batch = False, 30_000, 32
            self._forget(client)
        for _ in range(ROUNDS_MAX):
            if self._round():
                break
        else:
            raise BrokenRuleError(f"it is never all consumed: {self.tables.windows}")
        self.oracle.at_the_end()

    def _round(self) -> bool:
        told = self.oracle.told
        for client in self.clients:
            self.now_ms += 5
            self.receive(client)
            self._run()
            held, client.held = client.held, []
            for sent, one, handle in held:
                self._ack(self.leader, sent, one, handle)
            self._run()
        if self.oracle.told > told:
            return False
        if self._is_all_consumed():
            return True
        due_ms = self.leader.engine.due_ms()
        self.now_ms = max(self.now_ms + 5, min((due_ms or 0) - self.leader.skew_ms, self.now_ms + 7_200_000))
        self._run()
        return False

    def _run(self) -> None:
        self.leader.look()
        while self.log:
            self.commit(len(self.log))
            self.now_ms += 5
            self.leader.look()

    def _is_all_consumed(self) -> bool:
        for place, queue in self.queues.items():
            window = self.tables.windows.get(place)
            if window is None or window.commit < len(queue) or window.parked or self.offsets[place] != window.commit:
                return False
        return True


def _through_json(value: object) -> object:
    return json.loads(json.dumps(value))
