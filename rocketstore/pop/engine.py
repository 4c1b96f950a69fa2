"""The leader's side of pop: what is given out to whom, until when, and what comes again. Pure: it reads no clock, waits
for nothing and writes nothing.

One side that does (``rocketstore.broker``) drives it, on one thread, and nothing here takes long:

* a topic of a group is loaded once (``load``) per leadership, when somebody first asks: the engine raises
  ``NotLoadedError`` until then, and again after the group or topic was deleted. A full window takes 20 ms: ``take_up``
  each before;
* a receive: ``begin``; then, while ``next_read`` names a place, read there and tell ``took``; if there are messages
  ``finish``, and answer when it is done; if there are none ``finish`` too, or wait until the topic has new messages or
  is among ``woken``, and ``begin`` again. A client that is gone: ``cancel``, at any time;
* ``ack``, ``change`` and ``dead_letter`` return operations, which may be done at once;
* *after every call* look at ``take_done``, ``take_copies``, ``take_woken`` and ``take_tick``. A tick is written as one
  change of the state (``PopRows``), and ``ticked`` is called with what became of it. ``ticked`` may be called again
  only for another tick;
* at ``due_ms``: ``expire``, and look again;
* when leadership ends: ``close``, and a new engine for the next one.

``now_ms`` is wall-clock time, ms since 1970, that never goes back and does not jump while the engine lives: the time
when it was made, plus what has passed by a monotonic clock. Other members must agree with it to within ``SKEW_MS``.

The rules are P1 to P13 of docs/messages.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rocketstore.pop.operations import (
    Changing,
    Handle,
    InvalidHandleError,
    Leased,
    Pending,
    PopCopy,
    PopDelivery,
    PopFound,
    PopRead,
    PopWish,
    Settling,
    Tick,
    Verdict,
    decode_handle,
    encode_handle,
)
from rocketstore.pop.queue import (
    INVISIBLE_MS_MAX,
    UNKNOWN,
    Lease,
    Queue,
    attempts_so_far,
    covers,
    is_locked,
    next_batch,
)
from rocketstore.pop.tables import AHEAD_MAX, LEASE_MS_MAX, PARKED_MAX, FifoLock, Parked, PopPlace, retry_topic_of
from rocketstore.pop.windows import COPIES_MAX, GIVEN_BACK_MS, NotLoadedError, Windows

LEASES_MAX: Final = 262_144
PARKED_TOTAL_MAX: Final = 100_000
OWNER_PERCENT: Final = 50
"""Of either, for one owner, so that nobody keeps all others from receiving for hours."""
_RETRIES_PERCENT: Final = 20
"""How often the retry topic comes before the others (P7)."""
AUTO_RENEW_MS_MAX: Final = 3 * 3_600_000


class PopEngine(Windows):
    # -- receives ------------------------------------------------------------------------------------------------------

    def begin(self, wish: PopWish, now_ms: int) -> PopDelivery:
        """Start a receive. Raises ``NotLoadedError``."""
        self._now_ms = now_ms
        topic = self._topic(wish.group, wish.topic)
        places = [PopPlace(wish.group, wish.topic, one) for one in wish.queue_ids]
        if any(one not in self._queues or self._queues[one].window is None for one in places):
            raise NotLoadedError(wish.group, wish.topic)
        if not wish.by_priority and places:
            first = self._choose(len(places))
            places = places[first:] + places[:first]
        if wish.with_retries and topic.retries in self._queues:
            ordered = self._is_ordered(wish.group)
            at = 0 if not ordered and self._choose(100) < _RETRIES_PERCENT else len(places)
            places.insert(at, topic.retries)
        return PopDelivery(wish, places[::-1])

    def next_read(self, delivery: PopDelivery, now_ms: int) -> PopRead | None:
        """Where to look for messages next; None if there is enough, or nothing more to look at.

        A batch of an ordered group is of one queue (P8).
        """
        self._now_ms = now_ms
        ordered = self._is_ordered(delivery.wish.group)
        while delivery.places and delivery.room > 0 and not (ordered and delivery.messages):
            queue = self._queue(delivery.places.pop())
            if queue is None:
                continue
            read = self._read(queue, delivery, ordered=ordered)
            if read is not None:
                queue.reader = delivery.reading = read
                return read
        return None

    def _read(self, queue: Queue, delivery: PopDelivery, *, ordered: bool) -> PopRead | None:
        wish = delivery.wish
        if queue.reader is not None:
            queue.passed_over = True
            return None
        was_ordered, queue.is_ordered = queue.is_ordered, ordered
        if ordered:
            again = next_batch(queue, wish.attempt_id, delivery.room, self._now_ms)
            if again is None:
                return None
            if again and not is_locked(queue, self._now_ms) and self._is_worn_out(queue, again[0]):
                self._end_batch(queue)
                return None
            if again:
                return PopRead(queue.place, again[0], len(again), again)
        elif (was_ordered or queue.lock is not None) and not self._unlock(queue):
            delivery.full = queue.passed_over = True
            return None
        room = min(queue.room, LEASES_MAX - self._book.count)
        if wish.owner:
            room = min(room, LEASES_MAX * OWNER_PERCENT // 100 - self._book.owned[wish.owner])
        if not ordered and self._invisible_ms(wish) > LEASE_MS_MAX:
            room = min(room, self._room_to_park(queue, wish.owner))
        if room <= 0:
            delivery.full = queue.passed_over = True
            return None
        return PopRead(queue.place, queue.cursor, min(room, delivery.room))

    def _unlock(self, queue: Queue) -> bool:
        """The group is not ordered any more: its batches are ordinary leases, and the messages behind them come again.

        Not yet (False) if some of them are long, and there is no room to park these.
        """
        ends = [queue.leases[one].visible_at_ms for one in queue.open_offsets() if one in queue.leases]
        long = sum(one > self._now_ms + LEASE_MS_MAX for one in ends)
        if long and long > self._room_to_park(queue, ""):
            return False
        queue.lock = None
        for offset in queue.open_offsets():
            lease = queue.leases.get(offset) or Lease(self._now_ms, UNKNOWN, 0)
            self._book.add(queue, offset, lease)
            if lease.visible_at_ms > self._now_ms + LEASE_MS_MAX:
                self._book.park(queue, lease)
            self._end_lease(queue, offset, lease, lease.visible_at_ms)
        return True

    def took(
        self,
        delivery: PopDelivery,
        found: Sequence[PopFound],
        next_offset: int,
        now_ms: int,
        *,
        begin: int = 0,
        end: int = 1 << 62,
    ) -> None:
        """Take the messages found at the place of ``next_read`` that pass the filter, in order.

        All others from there to ``next_offset`` do not pass it, or are not there any more, and are settled for the
        group; so are all before ``begin``, the queue's first message. Messages read beyond ``count_max`` must not be
        delivered. ``end``: after the queue's last message, about.
        """
        self._now_ms = now_ms
        read, delivery.reading = delivery.reading, None
        queue = self._queue(read.place) if read is not None else None
        if read is None or queue is None or queue.reader is not read:
            return  # the offsets were reset meanwhile
        queue.reader = None
        self._wake_passed_over(queue)
        for offset in queue.skip_to(begin):
            self._book.drop(queue, offset)
        if read.only:
            self._took_again(delivery, queue, read, found)
        else:
            self._took_new(delivery, queue, found, next_offset)
            self._may_run_ahead(delivery.wish, queue, end)
        self._journal.add(queue)

    def _took_new(self, delivery: PopDelivery, queue: Queue, found: Sequence[PopFound], next_offset: int) -> None:
        ordered = self._is_ordered(queue.place.group)
        parks = not ordered and self._invisible_ms(delivery.wish) > LEASE_MS_MAX
        number = queue.next_number() if found else 0
        before = len(delivery.messages)
        for offset, attempt in found:
            if offset < queue.cursor:
                continue
            queue.settle_up_to(offset)
            if offset > queue.cursor or queue.room <= 0 or delivery.room <= 0:
                break
            if parks and self._room_to_park(queue, delivery.wish.owner) <= 0:
                delivery.full = True  # others have taken it meanwhile
                break
            queue.cursor = offset + 1
            self._lease(delivery, queue, offset, 1 if ordered else attempt, number, ordered=ordered)
        else:
            queue.settle_up_to(next_offset)
        if ordered and len(delivery.messages) > before:
            self._lock(delivery, queue, 1, number)

    def _may_run_ahead(self, wish: PopWish, queue: Queue, end: int) -> None:
        """If all messages of the queue are out, the next receive will wait, and shall get the next one at once."""
        invisible_ms = self._invisible_ms(wish)
        waits = self._runs_ahead and queue.cursor >= end and invisible_ms <= LEASE_MS_MAX
        is_plain = not self._is_ordered(wish.group) and queue.place.topic == wish.topic
        queue.runs_ahead_ms = invisible_ms if waits and is_plain else None

    def _took_again(self, delivery: PopDelivery, queue: Queue, read: PopRead, found: Sequence[PopFound]) -> None:
        """A batch that was out before: to the same attempt as it is, otherwise as a new delivery."""
        there = {one.offset for one in found}
        if is_locked(queue, self._now_ms):
            lock, attempt_id = queue.lock, delivery.wish.attempt_id
            if lock is not None and attempt_id and lock.attempt_id == attempt_id:
                for offset, lease in [(one, queue.leases.get(one)) for one in read.only if one in there]:
                    if lease is not None and not lease.copying and lease.number == lock.number:
                        # A new leader does not know whose it is to prolong, and a client that was gone may be back.
                        is_renewed = delivery.wish.auto_renew and not lease.renew_until_ms
                        if is_renewed or not lease.answers:  # or the other answers did not arrive
                            self._lease_again(delivery.wish, queue, offset, lease)
                        lease.answers += 1
                        delivery.messages.append(self._leased(queue, offset, lease))
            return  # otherwise somebody has prolonged a lease meanwhile
        for offset in read.only:
            if offset not in there:
                self._book.drop(queue, offset)
                queue.settle(offset)
        wanted = [one for one in read.only if one in there and not queue.is_settled(one)]
        if not wanted:
            return
        attempt = attempts_so_far(queue, wanted[0]) + 1
        number = queue.next_number()
        for offset in wanted:
            self._lease(delivery, queue, offset, attempt, number, ordered=True)
        self._lock(delivery, queue, attempt, number)

    def _lease_again(self, wish: PopWish, queue: Queue, offset: int, lease: Lease) -> None:
        """A message of an ordered group that was given back is wanted by the same attempt after all."""
        self._book.drop(queue, offset)
        if wish.auto_renew:
            lease.client_id, lease.renew_until_ms = wish.client_id, self._now_ms + AUTO_RENEW_MS_MAX
        self._book.add(queue, offset, lease)
        if queue.lock is not None:
            queue.lock = queue.lock._replace(attempt=lease.attempt)
        self._end_lease(queue, offset, lease, self._now_ms + self._invisible_ms(wish))

    def _lock(self, delivery: PopDelivery, queue: Queue, attempt: int, number: int) -> None:
        first, last = delivery.messages[0].offset, delivery.messages[-1].offset
        until_ms = delivery.messages[-1].visible_at_ms
        for offset in [one for one, lease in queue.leases.items() if not lease.parked and not first <= one <= last]:
            self._book.drop(queue, offset)  # their leases have ended, too; behind this batch they begin anew
        queue.lock = FifoLock(delivery.wish.attempt_id, first, last, until_ms, attempt, number)

    def _lease(
        self, delivery: PopDelivery, queue: Queue, offset: int, attempt: int, number: int, *, ordered: bool
    ) -> None:
        """Give a message out."""
        wish = delivery.wish
        invisible_ms = self._invisible_ms(wish)
        lease = Lease(self._now_ms + invisible_ms, attempt, number)
        if wish.auto_renew:
            lease.client_id, lease.renew_until_ms = wish.client_id, self._now_ms + AUTO_RENEW_MS_MAX
        lease.owner = wish.owner
        if not ordered and invisible_ms > LEASE_MS_MAX:
            lease.parked = True
            queue.park(offset, Parked(lease.visible_at_ms, attempt, number))
        elif not ordered:
            queue.leased_until_ms = max(queue.leased_until_ms, lease.visible_at_ms)
        self._book.add(queue, offset, lease)
        delivery.messages.append(self._leased(queue, offset, lease))

    def _leased(self, queue: Queue, offset: int, lease: Lease) -> Leased:
        handle = self._handle(queue, offset, lease.attempt, lease.number)
        end_ms = lease.visible_at_ms - lease.guard_ms
        return Leased(queue.place, offset, lease.attempt, handle, end_ms, queue.generation, lease.number)

    def finish(self, delivery: PopDelivery, now_ms: int) -> None:
        """The receive gets no more: it is done when all its messages are reserved (P1)."""
        self._now_ms = now_ms
        for place in {one.place for one in delivery.messages}:
            self._queue(place)
        delivery.messages = [one for one in delivery.messages if self._lease_of(one) is not None]
        of_queue: dict[PopPlace, list[Leased]] = {}
        for one in delivery.messages:
            of_queue.setdefault(one.place, []).append(one)
        queues = [self._queues[place] for place, some in of_queue.items() if not self._queues[place].permits(some)]
        if queues:
            self._journal.commit(delivery, queues)
        else:
            self._journal.end(delivery, Verdict.OK)

    def cancel(self, delivery: PopDelivery, now_ms: int) -> None:
        """Its client gets no answer: the messages are soon visible again, and that was no attempt."""
        self._now_ms = now_ms
        read, delivery.reading = delivery.reading, None
        queue = self._queues.get(read.place) if read is not None else None
        if queue is not None and queue.reader is read:
            queue.reader = None
            self._wake_passed_over(queue)
        self._journal.end(delivery, Verdict.FAILED)
        self._give_back(delivery.messages)
        delivery.messages = []

    def _noted_end_ms(self, message: Leased) -> int:
        """Until when a later leader takes a message for given out: a batch may have been given back meanwhile, and be
        leased again by a row that is not applied yet.
        """
        lock = self._queues[message.place].applied.fifo
        if lock is None or not covers(lock, message.offset):
            return message.visible_at_ms
        return min(message.visible_at_ms, lock.until_ms)

    def _lease_of(self, message: Leased) -> Lease | None:
        """The lease, if it is still that of this delivery."""
        queue = self._queues.get(message.place)
        lease = queue.leases.get(message.offset) if queue and queue.generation == message.generation else None
        return lease if lease is not None and lease.number == message.number and not lease.copying else None

    def _give_back(self, messages: Sequence[Leased]) -> None:
        """Messages that nobody got."""
        for message in messages:
            lease = self._lease_of(message)
            if lease is not None:
                lease.answers -= 1
            if lease is None or lease.answers:
                continue
            queue = self._queues[message.place]
            lease.renew_until_ms = 0
            if queue.lock is None:
                lease.attempt = max(lease.attempt - 1, 0)
            self._end_lease(queue, message.offset, lease, self._now_ms + GIVEN_BACK_MS, suspended=True)

    # -- handles -------------------------------------------------------------------------------------------------------

    def ack(self, group: str, topic: str, handles: Iterable[str], now_ms: int) -> list[Settling]:
        """Messages are consumed: for each handle an operation, done when its message is settled (P2).

        Those of one queue have one. Raises ``NotLoadedError``; to be repeated as a whole then.
        """
        self._now_ms = now_ms
        of_queue: dict[Queue | None, Settling] = {}
        found: list[Settling] = []
        for handle in handles:
            named = self._named(group, topic, handle)
            queue = None if named is None else named[0]
            if named is not None and named[1].offset not in named[0].acked:
                named[0].acked[named[1].offset] = named[1].number
                self._settle(named[0], named[1].offset, named[2])
            settling = of_queue.get(queue)
            if settling is None:
                settling = of_queue[queue] = Settling()
                if queue is None:
                    self._journal.confirm(settling, Verdict.INVALID_HANDLE)
                else:
                    self._journal.commit(settling, [queue])
            found.append(settling)
        return found

    def change(
        self, group: str, topic: str, handle: str, duration_ms: int, now_ms: int, *, suspend: bool = False
    ) -> Changing:
        """A message is to be visible again after another time from now (P6). Raises ``NotLoadedError``."""
        self._now_ms = now_ms
        changing = Changing()
        found = self._named(group, topic, handle)
        if found is None or found[1].offset in found[0].acked or (found[2] is None and self._is_ordered(group)):
            self._journal.confirm(changing, Verdict.INVALID_HANDLE)
            return changing  # behind the newest batch of an ordered group there are no leases
        queue, said, lease = found
        long = duration_ms > LEASE_MS_MAX and not covers(queue.lock, said.offset)
        owner = "" if lease is None else lease.owner
        if long and (lease is None or not lease.parked) and self._room_to_park(queue, owner) <= 0:
            self._journal.confirm(changing, Verdict.FULL)
            return changing
        if lease is None:
            lease = Lease(now_ms, said.attempt, said.number)
            self._book.add(queue, said.offset, lease)
        if lease.attempt == UNKNOWN or not lease.number:
            lease.attempt = said.attempt
        lease.number, lease.renew_until_ms = queue.next_number(), 0
        if suspend and queue.lock is None:
            lease.attempt = max(said.attempt - 1, 0)
        if long:
            self._book.park(queue, lease)
        self._end_lease(queue, said.offset, lease, now_ms + min(duration_ms, INVISIBLE_MS_MAX), suspended=suspend)
        changing.handle = self._handle(queue, said.offset, said.attempt, lease.number)
        changing.visible_at_ms = lease.visible_at_ms
        self._journal.commit(changing, [queue])
        return changing

    def next_offset(self, place: PopPlace) -> int | None:
        """The first message of a queue that was not given out; None if the queue is not loaded."""
        queue = self._queues.get(place)
        return None if queue is None else queue.cursor

    def handle_at(self, place: PopPlace, offset: int, visible_at_ms: int) -> str:
        """The handle of a message whose lease ends then; empty if there is none that this leader gave out."""
        queue = self._queues.get(place)
        lease = queue.leases.get(offset) if queue is not None else None
        if queue is None or lease is None or not lease.number or lease.visible_at_ms - lease.guard_ms != visible_at_ms:
            return ""
        return self._handle(queue, offset, lease.attempt, lease.number)

    def give_back(self, group: str, topic: str, handles: Sequence[str], now_ms: int) -> None:
        """These deliveries did not reach their client: the messages are soon visible again, and that was no attempt.

        Messages that are not loaded, are settled or have been given out again are passed over; the handles stay valid
        until then.
        """
        self._now_ms = now_ms
        for handle in handles:
            try:
                found = self._named(group, topic, handle)
            except NotLoadedError:
                continue
            if found is None:
                continue
            queue, said, lease = found
            if lease is not None and lease.number == said.number:
                self._give_back([self._leased(queue, said.offset, lease)])

    def dead_letter(self, group: str, topic: str, handle: str, now_ms: int) -> Settling:
        """A message is to be stored with the dead letters: done when it is, and settled; ``FULL``: too many copies are
        under way. Raises ``NotLoadedError``.
        """
        self._now_ms = now_ms
        settling = Settling()
        found = self._named(group, topic, handle)
        if found is None or found[1].offset in found[0].acked:
            self._journal.confirm(settling, Verdict.INVALID_HANDLE)
            return settling
        queue, said, lease = found
        if len(self._topic_of[queue.place].copying) >= COPIES_MAX:
            self._journal.confirm(settling, Verdict.FULL)
            return settling
        if lease is None:
            lease = Lease(now_ms, said.attempt, said.number)
            self._book.add(queue, said.offset, lease)
        self._dead[self._copy(queue, said.offset, lease, forced=True)] = settling
        return settling

    def client_gone(self, client_id: str, now_ms: int) -> None:
        """Make messages that are prolonged for a client visible again soon: some at once, others by ``expire``."""
        self._now_ms = now_ms
        self._book.leave(client_id)
        self._end_left()

    def _named(self, group: str, topic: str, text: str) -> tuple[Queue, Handle, Lease | None] | None:
        """The message that a handle names, if it is not settled and no newer handle of it is known (P5).

        Or if it is settled by an ack that is not yet applied.
        """
        try:
            said = decode_handle(text)
        except InvalidHandleError:
            return None
        if said.group != group or topic not in (said.topic, retry_topic_of(group, said.topic)):
            return None  # and nothing is loaded of a topic that the client may have no right to
        there = self._topic(group, said.topic)
        queue = self._queue(there.retries if said.is_retry else PopPlace(group, said.topic, said.queue_id))
        if queue is None or said.generation != queue.generation or said.offset >= queue.cursor:
            return None
        lease = queue.leases.get(said.offset)
        if lease is None:
            is_open = queue.acked.get(said.offset) == said.number or not queue.is_settled(said.offset)
            return (queue, said, None) if is_open else None
        return None if lease.copying or said.number < lease.number else (queue, said, lease)

    def _handle(self, queue: Queue, offset: int, attempt: int, number: int) -> str:
        topic, place = self._topic_of[queue.place], queue.place
        is_retry = place == topic.retries
        said = Handle(place.group, topic.topic, is_retry, place.queue_id, offset, attempt, number, queue.generation)
        return encode_handle(said)

    # -- what has happened ---------------------------------------------------------------------------------------------

    def take_tick(self, now_ms: int) -> Tick | None:
        """The next change to write, if one is due and none is under way."""
        self._now_ms = now_ms
        return self._journal.take(now_ms)

    def ticked(self, tick: Tick, failure: object, now_ms: int) -> None:
        """``failure`` None: the tick is applied. Anything else becomes the failure of the operations that waited for it
        and is told them; what they wanted is written again with the next tick, as long as this leadership lasts.
        """
        self._now_ms = now_ms
        self._journal.ticked(tick, failure)

    def take_done(self, now_ms: int) -> list[Pending]:
        """The operations that are done since the last call: answer their clients.

        Deliveries lack messages whose leases have ended before: that was no attempt.
        """
        self._now_ms = now_ms
        done, self._journal.done = self._journal.done, []
        for one in done:
            if isinstance(one, PopDelivery) and one.messages:
                messages, one.messages = one.messages, []
                for message in messages:
                    lease = self._lease_of(message)
                    end_ms = 0 if lease is None else min(lease.visible_at_ms, self._noted_end_ms(message))
                    if one.verdict is Verdict.OK and end_ms > now_ms:
                        is_cut = end_ms < message.visible_at_ms
                        one.messages.append(message._replace(visible_at_ms=end_ms) if is_cut else message)
                    else:
                        self._give_back([message])
        return done

    def take_copies(self) -> list[PopCopy]:
        """Messages to be stored again."""
        copies, self._copies = self._copies, []
        return copies

    def take_woken(self) -> set[tuple[str, str]]:
        """Groups and topics of which there may be messages that were locked, or in a queue that was full or read by
        another receive: look again for those who wait.
        """
        woken, self._woken = self._woken, set()
        return woken

    def close(self, failure: object) -> list[Pending]:
        """Leadership has ended: the operations that are not done, which now are, with this failure."""
        self._journal.close(failure)
        for one in self._dead.values():
            self._journal.end(one, Verdict.FAILED, failure)
        self._dead = {}
        done, self._journal.done = self._journal.done, []
        return done

    def _invisible_ms(self, wish: PopWish) -> int:
        return LEASE_MS_MAX if wish.auto_renew else max(1, min(wish.invisible_ms, INVISIBLE_MS_MAX))

    def _room_to_park(self, queue: Queue, owner: str) -> int:
        room = min(PARKED_MAX - AHEAD_MAX - queue.parked, PARKED_TOTAL_MAX - self._book.parked)
        if owner:
            room = min(room, PARKED_TOTAL_MAX * OWNER_PERCENT // 100 - self._book.owned_parked[owner])
        return room
