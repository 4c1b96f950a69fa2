"""Heartbeats: every broker knows a client's groups soon, and again after a lost connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from rocketstore.client.aio import cluster as module
from rocketstore.client.aio.cluster import Cluster, Heartbeats
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import ConsumerData, HeartbeatData, ProducerData
from tests.support.on_loop import on_loop, until
from tests.support.scripted_server import ScriptedServer, Topics, scripted_server

BEAT = RequestCode.HEART_BEAT
DATA = HeartbeatData("c1", (ProducerData("p"),), (ConsumerData("g"),))


@asynccontextmanager
async def beating(*, to_copies: bool = False) -> AsyncIterator[tuple[Cluster, Heartbeats, list[ScriptedServer]]]:
    """A client of a master and a slave."""
    async with scripted_server() as master, scripted_server() as slave:
        topics = Topics({"a": {0: master.address, 1: slave.address}}, {})
        for one in (master, slave):
            topics.serve(one)
            one.scripts[BEAT] = one.scripts[RequestCode.UNREGISTER_CLIENT] = lambda frame: frame.answer()
        cluster = Cluster([master.address], None, timeout_s=60, lost=lambda address: beats.lost(address))
        beats = Heartbeats(cluster, lambda: DATA, to_copies=to_copies)
        await cluster.brokers(cluster.deadline())
        yield cluster, beats, [master, slave]
        await beats.stop()
        await cluster.close()


@on_loop
async def test_masters_get_one_and_copies_if_they_shall() -> None:
    async with beating() as (_, beats, (master, slave)):
        await beats.send_now()
        assert (len(master.of(BEAT)), len(slave.of(BEAT))) == (1, 0)
        assert HeartbeatData.decode(master.of(BEAT)[0].body) == DATA
        assert beats.known_at == {master.address}
    async with beating(to_copies=True) as (_, beats, (master, slave)):
        await beats.send_now()
        assert (len(master.of(BEAT)), len(slave.of(BEAT))) == (1, 1)


@on_loop
async def test_they_are_repeated_in_time_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async with beating() as (_, beats, (master, _slave)):
        await beats.send_now()
        await beats.send_now()
        assert len(master.of(BEAT)) == 1
        monkeypatch.setattr(module, "INTERVAL_S", 0.0)
        await beats.send_now()
        assert len(master.of(BEAT)) == 2


@on_loop
async def test_a_broker_whose_connection_was_lost_is_told_again_at_once() -> None:
    """It has forgotten this client with the connection."""
    async with beating() as (_, beats, (master, _slave)):
        beats.start()
        await until(lambda: len(master.of(BEAT)) == 1, "the first one")
        master.hang_up()
        await until(lambda: len(master.of(BEAT)) == 2, "the second one")


@on_loop
async def test_another_master_is_noticed_although_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an idle producer would not be asked about the transactions that it left open with the old one."""
    monkeypatch.setattr(module, "INTERVAL_S", 0.02)
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    async with beating() as (_, beats, (master, slave)):
        beats.start()
        await until(lambda: beats.known_at == {master.address}, "the first one")
        for one in (master, slave):
            Topics({"a": {0: slave.address, 1: master.address}}, {}).serve(one)
        await until(lambda: beats.known_at == {slave.address}, "the new master knows it")


@on_loop
async def test_a_change_of_groups_is_told_to_all_at_once() -> None:
    async with beating() as (_, beats, (master, _slave)):
        beats.start()
        await until(lambda: len(master.of(BEAT)) == 1, "the first one")
        beats.soon()
        await until(lambda: len(master.of(BEAT)) == 2, "the second one")


@on_loop
async def test_a_change_while_a_heartbeat_is_on_its_way_is_told_after_it() -> None:
    """The broker has the old groups until then."""
    async with beating() as (_, beats, (master, _slave)):
        go = asyncio.Event()

        async def slowly(frame: Frame) -> Frame:
            await go.wait()
            return frame.answer()

        master.scripts[BEAT] = slowly
        beats.start()
        await until(lambda: len(master.of(BEAT)) == 1, "the first one")
        beats.soon()
        go.set()
        await until(lambda: len(master.of(BEAT)) == 2, "the second one")
        await until(lambda: beats.known_at == {master.address}, "it is known")


@on_loop
async def test_a_refusal_is_kept_for_who_asks_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    async with beating() as (_, beats, (master, _slave)):
        master.scripts[BEAT] = lambda frame: frame.answer(AnswerCode.NO_PERMISSION, "not your group")
        beats.start()
        await until(lambda: beats.error(master.address), "it was refused")
        assert "not your group" in str(beats.error(master.address))
        assert beats.known_at == set()
        master.scripts[BEAT] = lambda frame: frame.answer()
        await until(lambda: beats.known_at == {master.address}, "it was accepted")
        assert beats.error(master.address) is None


@on_loop
async def test_who_leaves_says_so_for_each_of_its_groups() -> None:
    async with beating() as (_, beats, (master, slave)):
        beats.start()
        await until(lambda: beats.known_at, "the first one")
        await beats.stop()
        left = [one.fields for one in master.of(RequestCode.UNREGISTER_CLIENT)]
        assert left == [{"clientID": "c1", "producerGroup": "p"}, {"clientID": "c1", "consumerGroup": "g"}]
        assert not slave.requests
        await beats.stop()
        assert len(master.of(RequestCode.UNREGISTER_CLIENT)) == 2
