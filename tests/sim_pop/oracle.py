"""What consumers may rely on, stated for one message at a time, from what they were told and nothing else.

* What was acknowledged never comes again, and neither does a dead letter.
* What was not acknowledged comes again, or is a dead letter: at the end nothing is left.
* While a message is invisible, by the answer to whoever has it, nobody else gets it.
* A handle is accepted only if it is of the newest delivery that was told.
* A message that the filter does not want is never told.
* In an ordered group a message is told only when all before it in its queue are done, or are in the same batch.
* A message is tried no more often than the group says, and is dead no earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rocketstore.pop.tables import PopPlace


class BrokenRuleError(AssertionError):
    """Raised when a rule does not hold."""


@dataclass(slots=True, eq=False)
class Told:
    """A delivery that reached its consumer; times are true ones."""

    handle: str
    leader: int
    client: str
    end_ms: int
    """Until when the consumer was told that nobody else gets it."""
    is_prolonged: bool
    """Whether the leader prolongs it, as long as it leads and the consumer is there."""
    was_prolonged: bool
    """The same, ever."""
    attempt: int
    kept_until_ms: int = 0
    """The leader prolongs it no longer than this."""
    changes_open: int = 0
    """Changes that were sent, and have no certain outcome."""


@dataclass(slots=True, eq=False)
class Sent:
    """A message, with its copies."""

    number: int
    place: PopPlace
    offset: int
    wanted: bool
    deliveries: list[Told] = field(default_factory=list)
    leases: int = 0
    """How often it was given out, told or not."""
    is_acked: bool = False
    acks_open: int = 0
    """Acks that were sent, and not refused for good."""
    resets: int = 0
    """How often somebody has reset the offsets, since when earlier acks do not count."""
    may_be_dead: bool = False
    """The same of a consumer's wish for that."""
    is_dead: bool = False
    may_be_gone: bool = False
    """It has expired, or somebody has reset the offsets."""
    may_repeat: bool = False
    """Somebody has reset the offsets."""

    @property
    def is_done(self) -> bool:
        """Whether it need not come any more."""
        return self.is_acked or self.acks_open > 0 or self.is_dead or self.may_be_gone or not self.wanted


class Oracle:
    """All messages of a group. ``attempts_max`` 0: without end."""

    def __init__(self, *, ordered: bool, attempts_max: int) -> None:
        self.ordered = ordered
        self.attempts_max = attempts_max
        self.switches = False
        """Whether somebody changes ``ordered`` now and then."""
        self.sent: list[Sent] = []
        self.by_place: dict[tuple[PopPlace, int], Sent] = {}
        self.told = 0
        self.repeated = 0

    def new(self, place: PopPlace, offset: int, *, wanted: bool) -> Sent:
        """A message is in the log."""
        sent = Sent(len(self.sent), place, offset, wanted)
        self.sent.append(sent)
        self.by_place[place, offset] = sent
        return sent

    def batch(self, now_ms: int, batch: Sequence[tuple[Sent, Told]]) -> None:
        """A receive was answered, and the answer arrived."""
        is_new = not any(sent.deliveries and sent.deliveries[-1] is told for sent, told in batch)
        for sent, told in batch:
            self._delivered(now_ms, sent, told)
        if self.ordered and batch and is_new:  # otherwise it lacks what its consumer has given back since
            self._in_order([sent for sent, _ in batch])

    def _delivered(self, now_ms: int, sent: Sent, told: Told) -> None:
        last = sent.deliveries[-1] if sent.deliveries else None
        self.told += 1
        self.repeated += last is not None
        _rule(sent.wanted, sent, "is told although the filter does not want it")
        if self.attempts_max:
            _rule(told.attempt <= self.attempts_max, sent, f"is tried for the {told.attempt}th time")
        _rule(told.attempt <= sent.leases or sent.may_repeat, sent, "was never given out that often")
        if last is not None and last.handle == told.handle:
            _rule(not sent.is_acked or sent.may_repeat, sent, "is told the same attempt again after its ack")
            return
        if not sent.may_repeat:
            _rule(not sent.is_acked, sent, "comes again after its ack")
            _rule(not sent.is_dead, sent, "comes again although it is dead")
            if last is not None:
                _rule(now_ms >= last.end_ms, sent, f"is visible again {last.end_ms - now_ms} ms early")
                is_kept = last.is_prolonged and last.leader == told.leader and now_ms < last.kept_until_ms
                _rule(not is_kept, sent, "is visible again although its lease is prolonged")
        sent.deliveries.append(told)

    def _in_order(self, batch: Sequence[Sent]) -> None:
        offsets = [one.offset for one in batch]
        if any(one.may_repeat for one in self.sent):
            return
        _rule(len({one.place for one in batch}) == 1, batch[0], "is in a batch with messages of other queues")
        _rule(offsets == sorted(offsets), batch[0], "is in a batch out of order")
        for offset in range(offsets[-1]):
            before = self.by_place[batch[0].place, offset]
            done = before.is_done or before.may_be_dead or before in batch
            _rule(done, batch[-1], f"overtakes the message at {offset}")

    def acked(self, now_ms: int, sent: Sent, told: Told, handle: str, leader: int) -> None:
        """An ack was answered with OK."""
        self._accepted(now_ms, sent, told, handle, leader, "ack")
        sent.is_acked = True

    def changed(self, now_ms: int, sent: Sent, told: Told, handle: str, leader: int) -> None:
        """So was a change of invisibility; the caller says in ``told`` what is new."""
        self._accepted(now_ms, sent, told, handle, leader, "change")

    def _accepted(self, now_ms: int, sent: Sent, told: Told, handle: str, leader: int, what: str) -> None:
        if sent.may_repeat:
            return
        is_over = self.ordered and sent.deliveries[-1].end_ms < now_ms  # behind a batch, nobody has it
        is_over = is_over or self.switches  # of what was a batch once, a new leader knows no numbers
        _rule(sent.deliveries[-1] is told or is_over, sent, f"accepts the {what} of an older delivery")
        is_old = told.handle != handle and told.leader == leader
        _rule(not is_old, sent, f"accepts the {what} with a handle that this leader has replaced")
        _rule(not sent.is_dead, sent, f"accepts an {what} of a dead letter")

    def refused(self, sent: Sent, told: Told, handle: str, now_ms: int) -> None:
        """A handle was refused for good: not while the message is invisible for whoever was told this handle last."""
        is_over = (
            sent.may_repeat
            or sent.may_be_gone
            or sent.acks_open > 0
            or sent.is_acked
            or sent.may_be_dead
            or sent.is_dead
        )
        is_newest = sent.deliveries[-1] is told and told.handle == handle and not told.changes_open
        _rule(is_over or not is_newest or now_ms >= told.end_ms, sent, "is refused although nobody else has it")

    def dead(self, sent: Sent) -> None:
        """Its copy is among the dead letters."""
        if not sent.may_repeat:
            _rule(not sent.is_dead, sent, "is a dead letter twice")
            _rule(not sent.is_acked, sent, "is a dead letter after its ack")
            enough = sent.may_be_dead or sent.may_be_gone or 0 < self.attempts_max <= sent.leases
            _rule(enough, sent, "is dead too early")
        sent.is_dead = True

    def at_the_end(self) -> None:
        """All consumers were served until nothing came any more."""
        for sent in self.sent:
            _rule(sent.is_done, sent, "is lost")


def _rule(holds: bool, sent: Sent, what: str) -> None:
    if not holds:
        raise BrokenRuleError(
            f"message {sent.number}, {sent.place.topic}-{sent.place.queue_id} at {sent.offset}, {what}"
        )
