"""Requests larger than a server accepts: refused before they are sent, and nothing else is affected."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dledger.client import DLedgerClient, aio
from dledger.client.aio import appending as module
from dledger.config import ServerConfig
from dledger.errors import DLedgerError, EntryTooLargeError
from dledger.rpc import options
from dledger.values import MIB
from tests.support.fake_group import FakeGroup, fake_group

LIMIT = options.request_bytes_max(ServerConfig())
HUGE = bytes(LIMIT)
SMALL = b"small"
Outcome = DLedgerError | None


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    with fake_group() as made:
        yield made


def stored(group: FakeGroup) -> list[int]:
    """The lengths of what is in the log."""
    return [len(entry.body) for entry in group.nodes[0].entries]


def append(group: FakeGroup, bodies: list[bytes], *, is_async: bool, numbered: bool) -> list[Outcome]:
    """With a call for each: what became of it."""
    outcomes: list[Outcome] = []

    async def appended() -> None:
        async with aio.DLedgerClient(group.addresses, enable_idempotence=numbered) as client:
            for body in bodies:
                try:
                    await client.append(body)
                    outcomes.append(None)
                except DLedgerError as error:
                    outcomes.append(error)

    if is_async:
        asyncio.run(appended())
        return outcomes
    with DLedgerClient(group.addresses, enable_idempotence=numbered) as client:
        for body in bodies:
            try:
                client.append(body)
                outcomes.append(None)
            except DLedgerError as error:
                outcomes.append(error)
    return outcomes


def submit(group: FakeGroup, bodies: list[bytes], *, is_async: bool, numbered: bool) -> list[Outcome]:
    """Submitted together: what became of each."""

    async def appended() -> list[Outcome]:
        async with aio.DLedgerClient(group.addresses, enable_idempotence=numbered) as client:
            futures = [await client.submit(body) for body in bodies]
            await client.flush()
            return [one.exception() for one in futures]

    if is_async:
        return asyncio.run(appended())
    with DLedgerClient(group.addresses, enable_idempotence=numbered) as client:
        futures = [client.submit(body) for body in bodies]
        return [one.exception() for one in futures]


def assert_refused(error: object) -> None:
    assert isinstance(error, EntryTooLargeError)
    assert error.outcome == "not_applied"
    assert "max_entry_bytes" in str(error), "it says what to do"


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_append_that_is_too_large_is_refused_before_it_is_sent(
    group: FakeGroup, *, is_async: bool, numbered: bool
) -> None:
    """With the limit in the error; the next append uses the same stream."""
    first, refused, last = append(group, [SMALL, HUGE, SMALL], is_async=is_async, numbered=numbered)

    assert (first, last) == (None, None)
    assert_refused(refused)
    assert str(LIMIT) in str(refused)
    assert stored(group) == [len(SMALL)] * 2


def test_the_largest_request_is_sent(group: FakeGroup) -> None:
    """The limit is that of the whole request: the server refuses the entry itself, for it is too large for the log."""
    [refused] = append(group, [bytes(8 * MIB)], is_async=False, numbered=True)

    assert isinstance(refused, EntryTooLargeError)
    assert str(4 * MIB) in str(refused)


@pytest.mark.parametrize("is_async", [False, True])
def test_append_many_appends_nothing_if_an_entry_is_too_large(group: FakeGroup, *, is_async: bool) -> None:
    """Also nothing of the requests before it, and also if no server was asked before."""

    async def appended() -> None:
        async with aio.DLedgerClient(group.addresses) as client:
            await client.append_many(bodies)

    bodies = [SMALL, HUGE, SMALL]
    with DLedgerClient(group.addresses) as client, pytest.raises(EntryTooLargeError) as caught:
        asyncio.run(appended()) if is_async else client.append_many(bodies)

    assert_refused(caught.value)
    assert stored(group) == []


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_queued_around_it_is_stored(group: FakeGroup, *, is_async: bool, numbered: bool) -> None:
    """It is refused alone."""
    first, refused, *rest = submit(group, [SMALL, HUGE, SMALL, SMALL], is_async=is_async, numbered=numbered)

    assert [first, *rest] == [None] * 3
    assert_refused(refused)
    assert stored(group) == [len(SMALL)] * 3


@pytest.mark.parametrize("numbered", [True, False])
def test_what_is_in_one_batch_with_it_is_stored(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch, *, numbered: bool
) -> None:
    """The batch is parted."""
    large = replace(module._SUBMITTED, linger_ms=10_000.0, batch_bytes=64 * MIB, pending_bytes_max=64 * MIB)
    monkeypatch.setattr(module, "_SUBMITTED", large)
    with DLedgerClient(group.addresses, enable_idempotence=numbered) as client:
        futures = [client.submit(body) for body in (SMALL, SMALL, HUGE, SMALL)]
        client.flush()
        first, second, refused, last = [one.exception() for one in futures]

    assert (first, second, last) == (None, None, None)
    assert_refused(refused)
    assert stored(group) == [len(SMALL)] * 3
