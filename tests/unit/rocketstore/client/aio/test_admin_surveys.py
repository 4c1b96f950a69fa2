"""What tools show of many topics and groups, of delayed messages and of clients, and which accounts see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.client.shared import ClientSecurity
from dledger.config import AccessConfig
from dledger.errors import CorruptLogError
from rocketstore.broker_config import BrokerConfig
from rocketstore.client.aio import errors
from rocketstore.client.aio.admin import Admin
from rocketstore.client.aio.admin_requests import DelayLevelStatus, TopicInfo
from rocketstore.client.aio.producer import Producer
from rocketstore.message.message import Message
from rocketstore.remoting.topics import MessageQueue
from rocketstore.server import BrokerServer
from tests.support.on_loop import on_loop, until
from tests.support.remoting import RemotingSocket
from tests.unit.rocketstore.test_server import alone, plain, running

HOUR_MS = 3_600_000
RULES = """accounts:
- accessKey: root
  secretKey: root-secret
  admin: true
- accessKey: alice
  secretKey: alice-secret
  topicPerms:
  - T=SUB
  groupPerms:
  - g=SUB
"""
ROOT = ClientSecurity(access_key="root", secret_key="root-secret")
ALICE = ClientSecurity(access_key="alice", secret_key="alice-secret")


@asynccontextmanager
async def admin_of(broker: BrokerServer, security: ClientSecurity | None = None) -> AsyncIterator[Admin]:
    async with Admin(broker.address, timeout_s=30, security=security) as admin:
        yield admin


@pytest.fixture(params=[plain, alone], ids=["plain", "group"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerServer]:
    config: BrokerConfig = request.param(tmp_path)
    with running(config) as server:
        yield server


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[BrokerServer]:
    """A broker with access control: alice may read T, for the group g."""
    rules = tmp_path / "plain_acl.yml"
    rules.write_text(RULES)
    rules.chmod(0o600)
    with running(replace(plain(tmp_path), access=AccessConfig(acl_enable=True, acl_file=rules))) as server:
        yield server


def queue(broker: BrokerServer, topic: str = "T", number: int = 0) -> MessageQueue:
    return MessageQueue(topic, broker.config.name, number)


# -- many topics and groups --------------------------------------------------------------------------------------------


@on_loop
async def test_many_topics_and_groups_are_asked_for_together(broker: BrokerServer) -> None:
    """Those that are not there are left out."""
    async with admin_of(broker) as admin, Producer(broker.address, timeout_s=30) as producer:
        names = [f"T{number}" for number in range(100)]
        for name in names:
            await admin.put_topic(TopicInfo(name, 2, 2))
        await producer.send(Message("T7", b"x"), queue=1)
        await until(lambda: broker.store.max_offset("T7", 1) == 1, "it is in its queue")
        for group in ("g", "h"):
            await admin.set_offsets(group, {queue(broker, "T7", 1): 1 if group == "g" else 0})

        ranges = await admin.topic_ranges([*names, "gone"])
        progress = await admin.progress_of(["g", "h", "gone"])

        assert ranges.keys() == set(names)
        assert [(one.queue.queue_id, one.max_offset) for one in ranges["T7"]] == [(0, 0), (1, 1)]
        assert {name: [one.lag for one in found] for name, found in progress.items()} == {"g": [0, 0], "h": [0, 1]}


@on_loop
async def test_a_damaged_message_hides_only_its_own_time(broker: BrokerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its queue ends is known all the same, and how far a group is."""
    async with admin_of(broker) as admin, Producer(broker.address, timeout_s=30) as producer:
        await admin.put_topic(TopicInfo("T", 1, 1))
        await producer.send(Message("T", b"x"), queue=0)
        await until(lambda: broker.store.max_offset("T", 0) == 1, "it is in its queue")
        await admin.set_offsets("g", {queue(broker): 1})

        def damaged(*_: object) -> int:
            raise CorruptLogError(Path("log"), 0, "the message does not match its CRC", "")

        monkeypatch.setattr(broker.store, "store_time", damaged)
        ((found,),) = (await admin.topic_ranges(["T"])).values()
        ((progress,),) = (await admin.progress_of(["g"])).values()

        assert (found.max_offset, found.last_update_ms) == (1, 0)
        assert (progress.committed, progress.last_ms) == (1, 0)


@on_loop
async def test_an_account_is_told_what_it_may_use(guarded: BrokerServer) -> None:
    """Of many the rest is left out; what is asked for by name is forbidden, and nothing was done."""
    async with admin_of(guarded, ROOT) as root, admin_of(guarded, ALICE) as alice:
        for name in ("T", "hidden"):
            await root.put_topic(TopicInfo(name, 1, 1))
        for group in ("g", "other"):
            await root.set_offsets(group, {queue(guarded): 0})

        assert (await alice.topic_ranges(["hidden", "T"])).keys() == {"T"}
        assert (await alice.progress_of(["other", "g"])).keys() == {"g"}
        assert [one.name for one in await alice.topics()] == ["T"]
        assert await alice.groups_of_topic("T") == ["g"]
        with pytest.raises(errors.ForbiddenError, match="needs SUB on topic hidden") as refused:
            await alice.queue_ranges("hidden")
        assert refused.value.outcome == "not_applied"
        with pytest.raises(errors.ForbiddenError, match="requires an account with admin: true"):
            await alice.put_topic(TopicInfo("T", 2, 2))


@on_loop
async def test_whoever_may_read_a_topic_may_look_at_its_messages(guarded: BrokerServer) -> None:
    """For no group, so without a permission on one; the group in whose name that is done is nobody's otherwise."""
    async with admin_of(guarded, ROOT) as root, admin_of(guarded, ALICE) as alice:
        for name in ("T", "hidden"):
            await root.put_topic(TopicInfo(name, 1, 1))
            async with Producer(guarded.address, timeout_s=30, security=ROOT) as producer:
                await producer.send(Message(name, b"x"), queue=0)
            await until(lambda name=name: guarded.store.max_offset(name, 0) == 1, "it is in its queue")  # type: ignore[misc]  # bound on purpose

        assert [one.body for one in (await alice.newest("T")).messages] == [b"x"]
        assert [one.body for one in (await alice.messages(queue(guarded), 0))[0]] == [b"x"]
        with pytest.raises(errors.ForbiddenError, match="needs SUB on topic hidden"):
            await alice.messages(queue(guarded, "hidden"), 0)
        with pytest.raises(errors.ForbiddenError, match="needs SUB on group TOOLS_CONSUMER"):
            await alice.set_offsets("TOOLS_CONSUMER", {queue(guarded): 0})


# -- delayed messages --------------------------------------------------------------------------------------------------


def waiting(broker: BrokerServer, level: int) -> int:
    return broker.store.max_offset("SCHEDULE_TOPIC_XXXX", level - 1)


@on_loop
async def test_levels_and_their_messages_are_shown(tmp_path: Path) -> None:
    """Each with its delay, how many wait, and when the first of them is due; messages from any offset on."""
    with running(plain(tmp_path, messageDelayLevel="1s 1h 2h")) as broker:
        async with admin_of(broker) as admin, Producer(broker.address, timeout_s=30) as producer:
            for body in (b"a", b"b", b"c"):
                await producer.send(Message("T", body, delay_level=2))
            await until(lambda: waiting(broker, 2) == 3, "they wait")

            levels, messages = await admin.delayed(2, max_messages=2)
            _, later = await admin.delayed(2, 2)

            assert levels == [
                DelayLevelStatus(1, 1000, 0, 0, -1),
                DelayLevelStatus(2, HOUR_MS, 0, 3, messages[0].store_timestamp + HOUR_MS),
                DelayLevelStatus(3, 2 * HOUR_MS, 0, 0, -1),
            ]
            assert [one.body for one in messages] == [b"a", b"b"]
            assert [(one.body, one.properties["REAL_TOPIC"]) for one in later] == [(b"c", "T")]
            assert (await admin.delayed(2, 3))[1] == (await admin.delayed(3))[1] == (await admin.delayed())[1] == []
            with pytest.raises(errors.NotFoundError, match="there is no delay level 4: use 1 to 3"):
                await admin.delayed(4)


@on_loop
async def test_a_delivered_message_waits_no_longer(tmp_path: Path) -> None:
    """It is not shown, not even if asked for by its offset."""
    with running(plain(tmp_path, messageDelayLevel="1s 1h")) as broker:
        async with admin_of(broker) as admin, Producer(broker.address, timeout_s=30) as producer:
            await admin.put_topic(TopicInfo("T", 1, 1))
            await producer.send(Message("T", b"soon", delay_level=1))
            await until(lambda: broker.store.max_offset("T", 0) == 1, "it is delivered")
            await until(lambda: broker.state.delay_offset(1) == 1, "that is noted")

            levels, messages = await admin.delayed(1, 0)

            assert (levels[0], messages) == (DelayLevelStatus(1, 1000, 1, 1, -1), [])


@on_loop
async def test_delayed_messages_are_for_administrators(guarded: BrokerServer) -> None:
    """Those of all topics wait together; also if they are pulled like others."""
    async with admin_of(guarded, ROOT) as root, admin_of(guarded, ALICE) as alice:
        assert len((await root.delayed())[0]) == 18
        assert await root.messages(queue(guarded, "SCHEDULE_TOPIC_XXXX"), 0) == ([], 0)
        with pytest.raises(errors.ForbiddenError, match="requires an account with admin: true"):
            await alice.delayed()
        with pytest.raises(errors.ForbiddenError, match="requires an account with admin: true"):
            await alice.messages(queue(guarded, "SCHEDULE_TOPIC_XXXX"), 0)


# -- single messages, and who is there ---------------------------------------------------------------------------------


@on_loop
async def test_a_message_is_sent_back_to_a_group(broker: BrokerServer) -> None:
    """By its position in the log: after the delay it is in the group's retry topic."""
    async with admin_of(broker) as admin, Producer(broker.address, timeout_s=30) as producer:
        await admin.put_topic(TopicInfo("T", 1, 1))
        await producer.send(Message("T", b"again"), queue=0)
        await until(lambda: broker.store.max_offset("T", 0) == 1, "it is in its queue")
        (message,), _ = await admin.messages(queue(broker), 0)

        await admin.send_back("g", "T", message.offset, delay_level=1, retries_max=3)

        await until(lambda: broker.store.max_offset("%RETRY%g", 0) == 1, "it is in the group's topic")
        (again,), _ = await admin.messages(queue(broker, "%RETRY%g"), 0)
        assert (again.body, again.reconsume_times) == (b"again", 1)
        with pytest.raises(errors.ClientError):
            await admin.send_back("g", "T", 1 << 40, delay_level=1, retries_max=3)


@on_loop
async def test_all_producers_are_listed_by_group(broker: BrokerServer) -> None:
    async with admin_of(broker) as admin:
        assert await admin.all_producers() == {}
        with RemotingSocket(broker.port) as member:
            await asyncio.to_thread(member.subscribe, "billing", "orders", "*", client_id="c1")
            found = await admin.all_producers()
            assert {group: [one.client_id for one in ones] for group, ones in found.items()} == {"billing": ["c1"]}
