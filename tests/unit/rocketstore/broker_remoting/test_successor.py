"""An old master that comes back finds out whether it has a successor, from what strangers may have registered."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

import pytest

from dledger.remoting.client import RemotingClient
from dledger.remoting.frame import Frame
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_remoting.registration import SuccessorWatch
from rocketstore.ha.protocol import PROOF, PROVE, answer_challenge
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.runtime import HaFacts
from rocketstore.remoting.topics import BrokerData, ClusterInfo, KVTable

COMMON = Random(1).randbytes(40_000)


class Bytes:
    """A log in memory, of one file."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.min_offset = 0
        self.max_offset = len(data)

    def stretch(self, offset: int, bytes_max: int) -> bytes:
        return self.data[offset : offset + bytes_max]


class Others:
    """A name server, and the broker that it names as master."""

    def __init__(self, name: str, log: Bytes, epoch: int, begin: int) -> None:
        self._name = name
        self._log = log
        self._facts = HaFacts(is_slave=False, epoch=epoch, begin=begin)
        self.asked = 0

    async def call(self, _address: str, frame: Frame, _timeout_s: float) -> Frame:
        if frame.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            known = {self._name: BrokerData("c", self._name, {0: "127.0.0.1:2"})}
            return frame.answer(body=ClusterInfo(known, {"c": (self._name,)}).encode())
        table = self._facts.table()
        if PROVE in frame.fields:
            self.asked += 1
            table[PROOF] = answer_challenge(self._log, frame.fields[PROVE])
        return frame.answer(body=KVTable(table).encode())

    async def close(self) -> None:
        """Nothing is open."""


class Watched:
    """The broker that may have a successor, and what it is told."""

    epoch = 1

    def __init__(self, log: Bytes, told: dict[str, str]) -> None:
        self.log = log
        self._told = told

    def superseded(self, why: str) -> None:
        self._told["superseded"] = why

    def suspected(self, why: str) -> None:
        self._told["suspected"] = why


def looked(own: Bytes, others: Bytes, *, begin: int) -> tuple[bool, bool, int]:
    """Whether the broker with this log is superseded by the other one, suspects it, and how often it has asked."""
    told: dict[str, str] = {}
    config = BrokerConfig(namesrv_addr="127.0.0.1:1")
    other = Others(config.name, others, epoch=3, begin=begin)
    client = cast(RemotingClient, cast(Any, other))

    async def look() -> None:
        watch = SuccessorWatch(
            config,
            lambda: "127.0.0.1:3",
            Watched(own, told),
            client,
            client,
        )
        await watch.look()
        await watch.close()

    asyncio.run(look())
    return "superseded" in told, "suspected" in told, other.asked


@pytest.mark.parametrize("common", [150, 3000, 5000, 40_000])
@pytest.mark.parametrize("seed", range(4))
def test_the_successor_of_a_successor_is_one(common: int, seed: int) -> None:
    """It says where it took over itself, which is behind the end of what this broker shares with it: what only this
    broker has, acknowledged and never sent, must not hide that it is no master any more.
    """
    own = Bytes(COMMON[:common] + Random(seed).randbytes(common // 3))
    others = Bytes(COMMON[:common] + Random(99).randbytes(90_000))
    superseded, suspected, _ = looked(own, others, begin=common + 80_000)
    assert superseded
    assert not suspected


def test_a_stranger_is_asked_a_few_times_and_ends_nobody() -> None:
    """Whatever it answers, and wherever it says that it took over."""
    superseded, suspected, asked = looked(Bytes(COMMON), Bytes(Random(5).randbytes(90_000)), begin=80_000)
    assert not superseded
    assert suspected
    assert 1 <= asked <= 16
