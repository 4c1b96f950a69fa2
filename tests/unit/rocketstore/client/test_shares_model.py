"""Members of a group that take queues from each other at any moment, against a model: nothing is skipped.

Messages are pulled in pieces of any size, handed out, done in any order, fail, and are committed at any moment; a
member loses its queue with or without a last commit, and another goes on where the group is.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dledger.errors import DLedgerError
from rocketstore.client.fetcher import Chunk
from rocketstore.client.shares import GroupDelivery, QueueName, Share, Shares
from rocketstore.message.message import Message
from rocketstore.message.record import encode_record
from tests.support.sweeps import fewer

PENDING_MAX = 3
_TAGS = st.sampled_from(["A", "B"])


class Pulled:
    """A source of one queue, of which each response is made by a rule."""

    def __init__(self, begin: int) -> None:
        self.offset = begin
        self.chunks: deque[Chunk] = deque()
        self.max_offset = -1
        self.skipped = 0
        self.has_nothing_to_compare = False

    @property
    def ready(self) -> bool:
        return bool(self.chunks)

    def take(self) -> Chunk | None:
        return self.chunks.popleft() if self.chunks else None

    def seek(self, offset: int, incarnation: int | None = None) -> None:
        self.chunks.clear()
        self.offset = offset

    def has_looked_at(self, _incarnation: int) -> bool:
        return True

    def is_at(self, incarnation: int) -> bool:
        return True

    def confirm(self, incarnation: int) -> None: ...
    def look_after(self, master: str | None) -> None: ...
    def stop(self) -> None: ...
    def join(self) -> None: ...


class Members(RuleBasedStateMachine):
    """One queue, and whoever has it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, bytes]] = []
        self.committed = 0
        self.acked: set[int] = set()
        self._join(ordered=False)

    def _join(self, *, ordered: bool) -> None:
        self.ordered = ordered
        self.shares = Shares(ordered=ordered, pending_max=PENDING_MAX, pending_bytes_max=1 << 20, failed=self._failed)
        self.share = Share(QueueName("T", 0), self.committed, self.committed, frozenset("A"))
        self.source = self.share.source = Pulled(self.committed)
        self.shares.add(self.share)
        self.held: list[GroupDelivery] = []

    def _failed(self, share: Share, error: DLedgerError) -> None:
        raise AssertionError(error)

    @rule(tag=_TAGS)
    def somebody_sends(self, tag: str) -> None:
        message = Message("T", b"%d" % len(self.records), 0, {"TAGS": tag})
        self.records.append((tag, encode_record(message, queue_offset=len(self.records), physical_offset=0)))

    @rule(count=st.integers(1, 5), filtered=st.booleans())
    def a_response_comes(self, count: int, filtered: bool) -> None:
        begin = self.source.offset
        found = self.records[begin : begin + count]
        if found:
            records = b"".join(record for tag, record in found if tag == "A" or not filtered)
            self.source.offset = begin + len(found)
            self.source.chunks.append(Chunk(records, self.source.offset))

    @rule()
    def it_takes_a_message(self) -> None:
        delivery = self.shares.receive(0.0)
        if delivery is not None:
            assert delivery.message.tags == "A"
            self.held.append(delivery)
            if self.ordered:
                assert delivery.message.queue_offset >= self.committed

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def it_is_done_with_one(self, data: st.DataObject) -> None:
        self.it_is_done_with_one_of(data.draw(st.integers(0, len(self.held) - 1)))

    def it_is_done_with_one_of(self, place: int) -> None:
        delivery = self.held.pop(place)
        if self.shares.claim(delivery):
            self.shares.finish(delivery)
        self.acked.add(delivery.message.queue_offset)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def one_fails_and_is_tried_again(self, data: st.DataObject) -> None:
        delivery = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        assert self.shares.claim(delivery)
        assert not self.shares.claim(delivery)
        self.shares.deliver_again(delivery, 0.0)

    @rule()
    def it_commits(self) -> None:
        self.committed = max(self.committed, self.share.progress.done)

    @rule(last_commit=st.booleans(), ordered=st.booleans())
    def another_takes_over(self, last_commit: bool, ordered: bool) -> None:
        self.shares.remove(self.share)
        if last_commit:
            self.it_commits()
        assert self.shares.receive(0.0) is None
        self._join(ordered=ordered)

    @rule(data=st.data())
    def the_offsets_are_reset(self, data: st.DataObject) -> None:
        self.committed = data.draw(st.integers(0, self.committed))
        self.shares.go_to(self.share, self.committed, 0)
        while self.held:  # what was in use before does not count any more
            delivery = self.held.pop()
            assert self.shares.claim(delivery)
            self.shares.finish(delivery)

    @invariant()
    def what_is_committed_is_done(self) -> None:
        wanted = {at for at, (tag, _) in enumerate(self.records) if tag == "A"}
        assert wanted & set(range(self.committed)) <= self.acked
        assert wanted & set(range(self.share.progress.done)) <= self.acked

    @invariant()
    def what_is_in_use_is_limited(self) -> None:
        assert len(self.share.progress) <= (1 if self.ordered else PENDING_MAX)
        assert self.share.out >= len(self.held)

    def teardown(self) -> None:
        """In the end everything is handed out, and done, and committed."""
        while self.held or self.source.offset < len(self.records) or self.source.ready or self.share.rest:
            self.a_response_comes(5, filtered=False)
            self.it_takes_a_message()
            while self.held:
                delivery = self.held.pop()
                assert self.shares.claim(delivery)
                self.shares.finish(delivery)
                self.acked.add(delivery.message.queue_offset)
        while (last := self.shares.receive(0.0)) is not None:
            self.shares.claim(last)
            self.shares.finish(last)
            self.acked.add(last.message.queue_offset)
        self.what_is_committed_is_done()
        assert self.share.progress.done == max(len(self.records), self.share.progress.done)
        assert {at for at, (tag, _) in enumerate(self.records) if tag == "A"} <= self.acked
        assert (len(self.share.progress), self.share.progress.size, self.share.out) == (0, 0, 0)


TestMembers = Members.TestCase
TestMembers.settings = settings(max_examples=fewer(100, 4), stateful_step_count=40, deadline=None)


def test_after_a_reset_nothing_is_handed_out_that_was_pulled_before() -> None:
    """Its offset would make those between count as done."""
    one = Members()
    for _ in range(3):
        one.somebody_sends("A")
    one.a_response_comes(3, filtered=False)
    one.it_takes_a_message()
    one.shares.go_to(one.share, 0, 0)
    assert one.shares.receive(0.0) is None
    assert one.share.progress.done == 0


def test_what_was_pulled_before_the_broker_lost_its_end_does_not_count_as_done() -> None:
    """The queue ended at 1, and grows again: what comes now has the offsets of messages that are still in use."""
    one = Members()
    for _ in range(5):
        one.somebody_sends("A")
    one.a_response_comes(1, filtered=False)
    one.it_takes_a_message()
    one.it_is_done_with_one_of(0)
    one.a_response_comes(2, filtered=False)
    one.source.chunks.append(Chunk(b"", 1, rewinds=True))
    one.it_takes_a_message()
    one.it_takes_a_message()
    assert [one.share.progress.done, one.share.rewind] == [1, False]
    one.source.offset = 1
    one.a_response_comes(4, filtered=False)
    one.it_takes_a_message()
    assert [one.share.progress.done, one.share.rewind] == [1, True]
    one.it_is_done_with_one_of(0)
    one.it_is_done_with_one_of(0)
    assert one.share.progress.done == 1
    one.it_is_done_with_one_of(0)
    assert one.share.progress.done == 2


def test_what_fails_after_a_reset_or_waits_meanwhile_holds_up_nothing() -> None:
    """In order, a message that counted as handed out for ever would be the queue's last one."""
    one = Members()
    one.another_takes_over(last_commit=False, ordered=True)
    for _ in range(2):
        one.somebody_sends("A")
    for wait_s in (0.0, 1000.0):
        one.a_response_comes(2, filtered=False)
        delivery = one.shares.receive(0.0)
        assert delivery is not None
        assert one.shares.claim(delivery)
        if wait_s:
            one.shares.deliver_again(delivery, wait_s)
            one.shares.go_to(one.share, 0, 0)
        else:
            one.shares.go_to(one.share, 0, 0)
            one.shares.deliver_again(delivery, wait_s)
        assert (one.share.out, len(one.share.progress)) == (0, 0)


def test_what_is_in_use_is_limited_by_bytes() -> None:
    """However many messages it is; one is always handed out."""
    one = Members()
    for _ in range(3):
        one.somebody_sends("A")
    size = len(one.records[0][1])
    for room, count in ((1, 1), (size + 1, 2)):
        one.shares = Shares(ordered=False, pending_max=9, pending_bytes_max=room, failed=one._failed)
        share = Share(QueueName("T", 0), 0, 0, None)
        one.source = share.source = Pulled(0)
        one.shares.add(share)
        one.a_response_comes(3, filtered=False)
        held = [found for _ in range(4) if (found := one.shares.receive(0.0)) is not None]
        assert len(held) == count
        assert one.shares.claim(held[0])
        one.shares.finish(held[0])
        assert one.shares.receive(0.0) is not None
        assert one.shares.receive(0.0) is None
