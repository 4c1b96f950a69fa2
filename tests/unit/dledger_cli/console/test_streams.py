"""What pages are sent, and when."""

from __future__ import annotations

import asyncio

import pytest

from dledger_cli.console.group_page import Streams


@pytest.mark.parametrize("hurries", [(True, False), (False, True), (True,)])
def test_news_of_the_lists_are_sent_with_whatever_comes_next(hurries: tuple[bool, ...]) -> None:
    """Also if something else has to hurry before that."""

    async def second_message() -> bytes | None:
        streams = Streams(
            lambda: {"number": 0}, lambda after: {"number": after}, lambda: {"version": 7}, lambda _: None
        )
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        streams.admit(queue)
        publishing = asyncio.create_task(streams.run())
        await queue.get()
        await asyncio.sleep(0)  # it runs now
        for catalog in hurries:
            streams.hurry(catalog=catalog)
        try:
            return await queue.get()
        finally:
            streams.close()
            await publishing

    message = asyncio.run(second_message())
    assert message is not None
    assert message.count(b'event: catalog\ndata: {"version":7}\n\n') == 1
