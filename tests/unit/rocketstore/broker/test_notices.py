"""Telling consumers that their group has changed."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import cast

from dledger.rpc import loops
from rocketstore.broker import groups as module
from rocketstore.broker.clients import ClientLink
from rocketstore.broker.groups import Notices


class _Link:
    """Counts what it is told, by group."""

    def __init__(self) -> None:
        self.told: Counter[str] = Counter()

    def members_changed(self, group: str) -> bool:
        self.told[group] += 1
        return True


async def _until(links: list[_Link], group: str) -> None:
    while any(not one.told[group] for one in links):
        await asyncio.sleep(0.01)


def test_changes_that_follow_each_other_are_told_together() -> None:
    """All hear of the last one."""

    async def test() -> None:
        links: list[_Link] = []
        notices = Notices(lambda _: [cast("ClientLink", one) for one in links])
        for _ in range(200):
            links.append(_Link())
            notices.changed("g")
            await asyncio.sleep(0)
        await _until(links, "g")
        assert max(one.told["g"] for one in links) <= 20
        notices.close()

    loops.run(asyncio.wait_for(test(), 30))


def test_a_large_group_is_not_told_in_one_go() -> None:
    async def test() -> None:
        links = [_Link() for _ in range(2 * module.NOTICES_AT_ONCE_MAX)]
        notices = Notices(lambda _: [cast("ClientLink", one) for one in links])
        notices.changed("g")
        while not links[0].told["g"]:
            await asyncio.sleep(0)
        assert sum(one.told["g"] for one in links) == module.NOTICES_AT_ONCE_MAX
        notices.changed("h")
        await _until(links, "g")
        await _until(links, "h")
        assert {one.told["g"] for one in links} == {1}
        notices.close()

    loops.run(asyncio.wait_for(test(), 30))
