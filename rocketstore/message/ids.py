"""Message ids: a message's position, and the unique id assigned by its producer. Upper-case hexadecimal."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from functools import cache
from itertools import count
from string import hexdigits
from struct import Struct, error
from typing import Final

from dledger.errors import InvalidRequestError
from rocketstore.message.message import HostAddress

PORT_MAX: Final = 65_535
_SHOWN_MAX: Final = 64
"""How much of a wrong id an error repeats."""
_ID: Final = re.compile(r"[0-9A-Fa-f]{32}(?:[0-9A-Fa-f]{24})?")
_PORT_AND_OFFSET: Final = Struct(">iq")
_I32_MASK: Final = 0xFFFF_FFFF
_COUNT_MASK: Final = 0xFFFF
_SKEW_MAX_MS: Final = 1_000_000
_IP_BYTES: Final = (4, 16)
_PROCESS_DIGITS_MAX: Final = 19
_PROCESS_AT: Final = {32: 8, 56: 32}
"""Where the process number stands in a unique id, by the id's length; the tag follows."""
_TAG_DIGITS: Final = 8


def offset_message_id(store_host: HostAddress, offset: int) -> str:
    """The id containing a record's broker and physical offset: 32 characters, or 56 with an IPv6 host.

    Raises ``InvalidRequestError`` if the host is not an IP address and port, or the offset is negative.
    """
    ip, port = store_host
    if len(ip) not in _IP_BYTES or offset < 0:
        raise InvalidRequestError("an id needs an IP address of 4 or 16 bytes and an offset that is not negative")
    try:
        return (ip + _PORT_AND_OFFSET.pack(port, offset)).hex().upper()
    except error as problem:
        raise InvalidRequestError(f"port or offset out of range for an id: {problem}") from problem


def parse_offset_message_id(text: str) -> tuple[HostAddress, int]:
    """The broker and the physical offset. Raises ``InvalidRequestError`` for an invalid id.

    A valid id need not refer to anything, and a producer's unique id can look like one, so check what is stored there.
    """
    if _ID.fullmatch(text) is None:
        raise InvalidRequestError(f"invalid offset message id {text[:_SHOWN_MAX]!r}: use 32 or 56 hexadecimal digits")
    packed = bytes.fromhex(text)
    port, offset = _PORT_AND_OFFSET.unpack(packed[-_PORT_AND_OFFSET.size :])
    if not 0 <= port <= PORT_MAX or offset < 0:
        raise InvalidRequestError(
            f"{text} is not an offset message id: it would name port {port} and offset {offset}; perhaps the "
            "producer gave it to the message: then look for it in the topic, as a unique key"
        )
    return HostAddress(packed[: -_PORT_AND_OFFSET.size], port), offset


class UniqueIds:
    """Generates ids unique among producers: address, process, a tag of this object, time in the month, count.

    ``tag`` takes the place of RocketMQ's hash of the class loader and distinguishes producers that share address and
    process number, as containers do; it is random unless given. Thread-safe: the count comes from ``itertools.count``,
    whose step is atomic. After 65,536 ids within one millisecond they repeat, which is RocketMQ's limit, too.
    """

    def __init__(self, ip: bytes, pid: int, now_ms: Callable[[], int], *, tag: int | None = None) -> None:
        own_tag = secrets.randbits(32) if tag is None else tag & _I32_MASK
        self._prefix = (ip + (pid & _COUNT_MASK).to_bytes(2, "big") + own_tag.to_bytes(4, "big")).hex().upper()
        self._now_ms = now_ms
        self._count = count()
        self._month = (0, 0)
        self._latest = (-1, "")
        """A moment, and the prefix of ids generated in it; replaced as a whole."""

    def next(self) -> str:
        """The next id: 32 characters, or 56 with an IPv6 address."""
        return f"{self._prefix_now()}{next(self._count) & _COUNT_MASK:04X}"

    def take(self, count: int) -> list[str]:
        prefix, counter = self._prefix_now(), self._count
        return [f"{prefix}{next(counter) & _COUNT_MASK:04X}" for _ in range(count)]

    def _prefix_now(self) -> str:
        now_ms = self._now_ms()
        moment, prefix = self._latest
        if now_ms != moment:
            prefix = self._prefix_at(now_ms)
            self._latest = now_ms, prefix
        return prefix

    def _prefix_at(self, now_ms: int) -> str:
        start_ms, next_start_ms = self._month
        if now_ms >= next_start_ms:
            self._month = start_ms, next_start_ms = _month_of(now_ms)
        passed_ms = now_ms - start_ms
        if -_SKEW_MAX_MS < passed_ms < 0:
            passed_ms = 0
        return f"{self._prefix}{passed_ms & _I32_MASK:08X}"


def process_of(unique_key: str) -> int:
    """The process number in a producer's unique id, of which it holds 16 bits; -1 if it is no such id."""
    at = _PROCESS_AT.get(len(unique_key), -1)
    text = unique_key[at : at + 4] if at >= 0 else ""
    return int(text, 16) if len(text) == 4 and all(one in hexdigits for one in text) else -1


def is_of_process(client_id: str, process: int) -> bool:
    """Whether a client's id, which is HOST@PROCESS and perhaps more, names this process (-1: none)."""
    text = client_id.partition("@")[2].partition("#")[0]
    known = text.isascii() and text.isdigit() and len(text) <= _PROCESS_DIGITS_MAX
    return known and int(text) & _COUNT_MASK == process


def is_of_client(client_id: str, unique_key: str) -> bool:
    """Whether this client, not only its process, gave a message its unique id: see ``ids_of_client``."""
    at = _PROCESS_AT.get(len(unique_key), -1) + 4
    tag = client_id.partition("#")[2][:_TAG_DIGITS].upper()
    is_its = len(tag) == _TAG_DIGITS and tag == unique_key[at : at + _TAG_DIGITS].upper()
    return is_its and is_of_process(client_id, process_of(unique_key))


def new_client_id() -> str:
    """A name for a member of a group, different from every other's: host, process and a random tag."""
    return f"{socket.gethostname()[:64]}@{os.getpid()}#{secrets.token_hex(6)}"


def ids_of_client(client_id: str) -> UniqueIds:
    """Unique ids that tell which client made them, given a ``new_client_id``: they have its tag."""
    return _ids_here(int(client_id.partition("#")[2][:_TAG_DIGITS], 16))


def unique_ids(count: int) -> list[str]:
    """Unique ids of this process, for the property ``UNIQ_KEY``."""
    return _own_ids().take(count)


@cache
def _own_ids() -> UniqueIds:
    return _ids_here(None)


def _ids_here(tag: int | None) -> UniqueIds:
    return UniqueIds(_own_ip(), os.getpid(), lambda: time.time_ns() // 1_000_000, tag=tag)


os.register_at_fork(after_in_child=_own_ids.cache_clear)  # a child process must not generate its parent's ids


def _own_ip() -> bytes:
    """This machine's address towards others (nothing is sent to determine it); random bytes if it has none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            address: str = probe.getsockname()[0]
        return socket.inet_aton(address)
    except OSError:
        return secrets.token_bytes(4)


def _month_of(now_ms: int) -> tuple[int, int]:
    """The start of the local month and of the next one, in milliseconds."""
    now = time.localtime(now_ms // 1000)
    start = time.mktime((now.tm_year, now.tm_mon, 1, 0, 0, 0, 0, 0, -1))
    end = time.mktime((now.tm_year, now.tm_mon + 1, 1, 0, 0, 0, 0, 0, -1))
    return int(start) * 1000, int(end) * 1000
