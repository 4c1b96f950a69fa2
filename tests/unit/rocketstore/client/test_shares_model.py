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

PENDING_MAX = 3
_TAGS = st.sampled_from(["A", "B"])


class Pulled:
    """A source of one queue, of which each response is made by a rule."""

    def __init__(self, begin: int) -> None:
        self.offset = begin
        self.chunks: deque[Chunk] = deque()
        self.rewound = False
        self.max_offset = -1
        self.skipped = 0

    @property
    def ready(self) -> bool:
        return bool(self.chunks)

    def take(self) -> Chunk | None:
        return self.chunks.popleft() if self.chunks else None

    def seek(self, offset: int) -> None:
        self.chunks.clear()
        self.offset = offset

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
        delivery = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
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
        self.shares.go_to(self.share, self.committed)
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
TestMembers.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_after_a_reset_nothing_is_handed_out_that_was_pulled_before() -> None:
    """Its offset would make those between count as done."""
    one = Members()
    for _ in range(3):
        one.somebody_sends("A")
    one.a_response_comes(3, filtered=False)
    one.it_takes_a_message()
    one.shares.go_to(one.share, 0)
    assert one.shares.receive(0.0) is None
    assert one.share.progress.done == 0
