"""The client for threads is what the one for asyncio makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.make_sync import MADE, ROOT, make


@pytest.mark.parametrize(("source", "made"), MADE.items())
def test_what_is_made_is_up_to_date(source: str, made: str) -> None:
    """Else `make unasync` was forgotten, or somebody changed what is made."""
    assert make(ROOT / source) == (ROOT / made).read_text()


def test_everything_asynchronous_is_taken_away_and_names_are_exchanged(tmp_path: Path) -> None:
    source = tmp_path / "aio_one.py"
    source.write_text(
        "from contextlib import aclosing\n\nfrom dledger.sending.aio import AsyncSender\n\n\n"
        "async def send(sender: AsyncSender) -> None:\n"
        "    async with aclosing(sender) as one:\n"
        "        async for _ in one:\n"
        "            await one.close()\n"
    )
    assert make(source) == (
        "from contextlib import closing\n\nfrom dledger.sending.threads import Sender\n\n\n"
        "def send(sender: Sender) -> None:\n"
        "    with closing(sender) as one:\n"
        "        for _ in one:\n"
        "            one.close()\n"
    )
