"""The receipt for a stored message."""

from __future__ import annotations

from dledger.records import record
from rocketstore.types import PutMessageStatus


@record(frozen=True, slots=True)
class SendReceipt:
    """Where a message is stored. ``message_id`` contains its position, ``unique_key`` is the producer's own id.

    ``status`` other than ``PUT_OK``: stored, but a flush or a copy was not confirmed in time. An empty ``message_id``
    and numbers of -1: an earlier request had stored the message, and the broker no longer remembers where.

    For a delayed message or one of an open transaction, ``queue_offset`` and ``message_id`` name the place where it
    waits, not one in its topic, where it is stored once more when it is delivered or committed.
    """

    topic: str
    queue_id: int
    queue_offset: int
    message_id: str
    unique_key: str
    offset: int
    store_timestamp: int
    status: PutMessageStatus = PutMessageStatus.PUT_OK
