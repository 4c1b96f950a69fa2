"""A message as passed to and returned by the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rocketstore.message.delay import parse_level

PROPERTY_KEYS: Final = "KEYS"
PROPERTY_TAGS: Final = "TAGS"
PROPERTY_UNIQUE_KEY: Final = "UNIQ_KEY"
PROPERTY_WAIT: Final = "WAIT"
PROPERTY_DELAY: Final = "DELAY"
PROPERTY_RETRY_TOPIC: Final = "RETRY_TOPIC"
"""The topic that a message was in before a consumer first sent it back."""
PROPERTY_REAL_TOPIC: Final = "REAL_TOPIC"
PROPERTY_REAL_QUEUE_ID: Final = "REAL_QID"
PROPERTY_TRANSACTION: Final = "TRAN_MSG"
PROPERTY_PRODUCER_GROUP: Final = "PGROUP"
PROPERTY_CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
"""Marks a half message; only brokers that can finish a transaction may store one."""

SYS_FLAG_COMPRESSED: Final = 0x1
SYS_FLAG_TRANSACTION: Final = 0xC
SYS_FLAG_PREPARED: Final = 0x4
SYS_FLAG_COMMITTED: Final = 0x8
SYS_FLAG_ROLLED_BACK: Final = 0xC
SYS_FLAG_BORN_HOST_V6: Final = 0x10
SYS_FLAG_STORE_HOST_V6: Final = 0x20


class HostAddress(NamedTuple):
    """An IP address, packed (4 or 16 bytes), and a port."""

    ip: bytes
    port: int


LOOPBACK: Final = HostAddress(b"\x7f\0\0\1", 0)


@dataclass(slots=True)
class Message:
    """One message. The fields from ``store_timestamp`` on are set by storing it or by decoding a stored record.

    ``properties`` contains RocketMQ's properties. ``body`` is stored unchanged (it may be compressed by the producer,
    see ``sys_flag``).
    """

    topic: str
    body: bytes
    queue_id: int = 0
    """The queue it is stored in. Producers take the queue as an argument (``send(message, queue_id=3)``)."""
    properties: dict[str, str] = field(default_factory=dict)
    flag: int = 0
    sys_flag: int = 0
    born_timestamp: int = 0
    born_host: HostAddress = LOOPBACK
    store_host: HostAddress = LOOPBACK
    reconsume_times: int = 0
    prepared_offset: int = 0
    store_timestamp: int = 0
    queue_offset: int = 0
    offset: int = 0
    """Physical offset of the record."""
    size: int = 0
    """Length of the record in bytes; 0 before it is stored."""
    body_crc: int = 0
    property_string: bytes = b""
    """The encoded properties, which replace ``properties`` in a message whose producer has already joined them, so that
    they need not be split and joined again.
    """
    checked_properties: bytes | None = field(default=None, repr=False, compare=False)
    """The property string, kept from the check of the message for its encoding, which follows and consumes it."""

    @property
    def tags(self) -> str:
        """The tag, or the empty string."""
        return self.properties.get(PROPERTY_TAGS, "")

    @property
    def keys(self) -> list[str]:
        """The business keys, separated by blanks."""
        return [one for one in self.properties.get(PROPERTY_KEYS, "").split(" ") if one]

    @property
    def unique_key(self) -> str:
        """The id assigned by the producer, or the empty string."""
        return self.properties.get(PROPERTY_UNIQUE_KEY, "")

    @property
    def delay_level(self) -> int:
        """1 and up (levels above the highest count as the highest), or 0 for a message without delay."""
        return parse_level(self.properties.get(PROPERTY_DELAY, ""))
