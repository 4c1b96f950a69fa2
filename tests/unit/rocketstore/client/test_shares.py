"""One queue of a member of a group, step by step."""

from __future__ import annotations

from dledger.errors import DLedgerError
from rocketstore.client.fetcher import Chunk
from rocketstore.client.shares import QueueName, Share, Shares
from rocketstore.message.message import Message
from rocketstore.message.record import encode_record
from tests.unit.rocketstore.client.test_shares_model import Pulled


def failed(_share: Share, error: DLedgerError) -> None:
    """Nothing may fail here."""
    raise AssertionError(error)


def ordered_queue() -> tuple[Shares, Share]:
    """A locked queue with two messages."""
    shares = Shares(ordered=True, pending_max=1, pending_bytes_max=1 << 20, failed=failed)
    share = Share(QueueName("T", 0), 0, 0, None)
    source = share.source = Pulled(0)
    records = b"".join(
        encode_record(Message("T", b"%d" % number, 0), queue_offset=number, physical_offset=0) for number in range(2)
    )
    source.chunks.append(Chunk(records, 2))
    shares.add(share)
    return shares, share


def test_a_message_that_is_tried_again_waits_for_the_lock() -> None:
    """As new ones do: another member may have the queue, and be further, once the lock has ended."""
    shares, share = ordered_queue()
    delivery = shares.receive(0.0)
    assert delivery is not None
    assert shares.claim(delivery)
    shares.deliver_again(delivery, 0.0)
    share.usable_until = 0.0

    assert shares.receive(0.0) is None

    share.usable_until = float("inf")
    again = shares.receive(5.0)
    assert again is not None
    assert again.message.queue_offset == 0


def test_nothing_is_handed_out_once_the_lock_has_ended() -> None:
    """A message that was never handed out stays where it is."""
    shares, share = ordered_queue()
    share.usable_until = 0.0
    assert shares.receive(0.0) is None
    share.usable_until = float("inf")
    delivery = shares.receive(0.0)
    assert delivery is not None
    assert delivery.message.body == b"0"


def test_what_was_in_use_of_a_queue_that_was_left_is_forgotten() -> None:
    """An application that says nothing more of such messages must not make the member keep them for ever."""
    shares, share = ordered_queue()
    kept = shares.receive(0.0)
    assert kept is not None
    shares.remove(share)
    assert shares.overdue(float("inf")) == [kept], "the last commit waits for it"
    share.progress.abandoned = True
    assert shares.overdue(float("inf")) == []
    assert not shares._out


def test_what_is_in_use_before_a_lost_end_is_not_passed_over() -> None:
    """The queue goes on behind it, but a position there would say that it is done."""
    shares = Shares(ordered=False, pending_max=8, pending_bytes_max=1 << 20, failed=failed)
    _, share = ordered_queue()
    source = share.source
    assert isinstance(source, Pulled)
    shares.add(share)
    first, second = shares.receive(0.0), shares.receive(0.0)
    assert first is not None
    assert second is not None
    source.chunks.append(Chunk(b"", 1, rewinds=True))
    assert shares.receive(0.0) is None
    assert (share.progress.done, source.offset) == (0, 0)
    for one in (first, second):  # it comes again: what is done of the old one does not count
        shares.claim(one)
        shares.finish(one)
    assert share.progress.done == 0
