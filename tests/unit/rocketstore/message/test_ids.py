"""Both kinds of message id."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from ipaddress import ip_address
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.errors import InvalidRequestError
from rocketstore.message.ids import (
    UniqueIds,
    ids_of_client,
    is_of_client,
    new_client_id,
    offset_message_id,
    parse_offset_message_id,
    unique_ids,
)
from rocketstore.message.message import HostAddress

V4 = HostAddress(ip_address("127.0.0.1").packed, 10_911)
V6 = HostAddress(ip_address("::1").packed, 10_911)


@pytest.mark.parametrize(
    ("host", "text"),
    [(V4, "7F00000100002A9F0000000000000400"), (V6, "00" * 15 + "0100002A9F0000000000000400")],
)
def test_an_offset_id_is_rocketmqs(host: HostAddress, text: str) -> None:
    """Host, port and offset; in either case of letters."""
    assert offset_message_id(host, 1024) == text
    assert parse_offset_message_id(text) == (host, 1024)
    assert parse_offset_message_id(text.lower()) == (host, 1024)


@given(
    st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16),
    st.integers(0, 65_535),
    st.integers(0, 2**63 - 1),
)
def test_every_offset_id_is_read_back(ip: bytes, port: int, offset: int) -> None:
    """Whatever the host and the offset."""
    assert parse_offset_message_id(offset_message_id(HostAddress(ip, port), offset)) == ((ip, port), offset)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7F00000100002A9F000000000000040",
        "7F00000100002A9F00000000000004000",
        "7F00000100002A9F000000000000040G",
        "7F 00000100002A9F00000000000004 0",
        "7F00000100002A9F000000000000_400",
        "7F00000100002A9F0000000000000400\n",
        "7F0000010001000000000000000004 00",
        "7F000001000100000000000000000400",
        "7F000001FFFFFFFF0000000000000400",
        "7F00000100002A9F8000000000000400",
        "\u0667F00000100002A9F000000000000040",
    ],
)
def test_what_is_no_offset_id_is_refused(text: str) -> None:
    """Wrong length, wrong digits, impossible ports and offsets."""
    with pytest.raises(InvalidRequestError):
        parse_offset_message_id(text)


def test_a_refused_id_is_named_and_a_producers_own_is_recognized() -> None:
    """RocketMQ's clients print the producer's id as msgId; it has the same length and says nothing of the place."""
    with pytest.raises(
        InvalidRequestError, match=r"invalid offset message id 'x{64}': use 32 or 56 hexadecimal digits"
    ):
        parse_offset_message_id("x" * 10_000)
    with pytest.raises(InvalidRequestError, match=r"7F000001256B30946E09854E45E90000 is not an .* as a unique key"):
        parse_offset_message_id("7F000001256B30946E09854E45E90000")


@given(st.text() | st.text("0123456789abcdefABCDEF", min_size=32, max_size=32))
def test_any_text_is_read_or_refused(text: str) -> None:
    """With no other error."""
    try:
        host, offset = parse_offset_message_id(text)
    except InvalidRequestError:
        return
    assert offset_message_id(host, offset) == text.upper()


@pytest.mark.parametrize(
    ("host", "offset"),
    [(HostAddress(b"", 1), 0), (HostAddress(bytes(5), 1), 0), (V4, -1), (V4, 2**63), (HostAddress(bytes(4), 2**31), 0)],
)
def test_what_no_id_can_hold_is_refused(host: HostAddress, offset: int) -> None:
    """Instead of an id of some other length."""
    with pytest.raises(InvalidRequestError):
        offset_message_id(host, offset)


def clock(*times_ms: int) -> Iterator[int]:
    """Gives the times one after the other."""
    return iter(times_ms)


def local_ms(*date: int) -> int:
    """Local time, in milliseconds since 1970."""
    return int(datetime(*date).astimezone().timestamp()) * 1000  # type: ignore[arg-type]  # year, month, day, hour...


def test_a_unique_id_tells_address_process_tag_time_and_count() -> None:
    """RocketMQ's layout; the time counts from the local start of the month."""
    now = clock(local_ms(2024, 2, 3, 4) + 5, local_ms(2024, 2, 3, 4) + 5)
    ids = UniqueIds(b"\x7f\0\0\1", 0x1_2345, now.__next__, tag=-2)

    passed = (2 * 24 + 4) * 3_600_000 + 5
    assert ids.next() == f"7F0000012345FFFFFFFE{passed:08X}0000"
    assert ids.next() == f"7F0000012345FFFFFFFE{passed:08X}0001"


def test_a_unique_id_with_an_ipv6_address_has_56_characters() -> None:
    """16 bytes of address instead of 4."""
    assert len(UniqueIds(V6.ip, 1, clock(0, 0).__next__).next()) == 56


def test_the_time_begins_anew_with_each_month_and_bears_a_clock_that_goes_back_a_little() -> None:
    """Also over the end of a year; a step back of less than 1000 s counts as none."""
    end = local_ms(2025, 1, 1)
    now = clock(end - 1, end + 7, end - 999_999, end - 1_000_001)
    ids = UniqueIds(b"\x7f\0\0\1", 1, now.__next__, tag=0)

    times = [int(ids.next()[20:28], 16) for _ in range(4)]

    assert times == [31 * 86_400_000 - 1, 7, 0, 2**32 - 1_000_001]


def test_the_count_wraps() -> None:
    """It has 16 bits."""
    ids = UniqueIds(b"\x7f\0\0\1", 1, lambda: 0, tag=0)

    counts = [ids.next()[-4:] for _ in range(65_537)]

    assert counts[65_534:] == ["FFFE", "FFFF", "0000"]


@pytest.mark.parametrize(
    ("client_id", "is_its"),
    [
        ("host@70000#00c0ffee9999", True),
        ("other@4464#00C0FFEE", True),
        ("host@70000#00c0ffe", False),
        ("host@70000#00c0ffef9999", False),
        ("host@70001#00c0ffee9999", False),
        ("host@70000", False),
        ("00c0ffee", False),
    ],
)
@pytest.mark.parametrize("ip", [b"\x7f\0\0\1", V6.ip])
def test_a_unique_id_tells_which_client_made_it(client_id: str, is_its: bool, ip: bytes) -> None:
    """By the process and the tag, which stands in the id of the client, too."""
    made = UniqueIds(ip, 70_000, lambda: 0, tag=0x00C0FFEE).next()
    assert is_of_client(client_id, made) is is_its
    assert not is_of_client(client_id, made[:-1])


def test_clients_of_one_process_give_ids_of_their_own() -> None:
    """With a new client's id, each recognizes its own."""
    first, second = new_client_id(), new_client_id()
    ids = ids_of_client(first)
    assert all(is_of_client(first, ids.next()) and not is_of_client(second, ids.next()) for _ in range(3))


def test_unique_ids_differ_between_threads_and_generators() -> None:
    """Two generators in one process have different tags."""
    found: list[str] = []
    threads = [
        Thread(target=lambda: found.extend([one for _ in range(250) for one in unique_ids(2)])) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(found)) == 2000
    assert {len(text) for text in found} == {32}
    one, other = (UniqueIds(b"\x7f\0\0\1", 1, lambda: 0) for _ in range(2))
    assert one.next() != other.next()


def test_a_machine_without_an_address_still_gives_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bytes stand for the address."""

    def refuse(*_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("rocketstore.message.ids.socket.socket", refuse)
    monkeypatch.setattr("rocketstore.message.ids.os.getpid", lambda: -1)

    assert len(unique_ids(1)[0]) == 32
