"""Queues by name, used as keys in many tables."""

from __future__ import annotations

from dledger.records import record
from rocketstore.remoting.body import Body
from rocketstore.remoting.headers import Int32


@record(frozen=True, slots=True)
class MessageQueue(Body):
    """One queue of a topic on one broker."""

    topic: str
    broker_name: str
    queue_id: Int32
