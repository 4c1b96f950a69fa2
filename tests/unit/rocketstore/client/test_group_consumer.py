"""Members of a group, at a broker of real services over a store in memory."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NoReturn, cast

import grpc
import pytest

from dledger.errors import AccessDeniedError, ConfigError, InvalidRequestError, UnavailableError
from rocketstore.broker.locks import LOCK_S
from rocketstore.client import group_consumer
from rocketstore.client.connection import BrokerConnection
from rocketstore.client.errors import NotFoundError
from rocketstore.client.group_branch import Assignment, Branch
from rocketstore.client.group_consumer import GroupConsumer
from rocketstore.client.group_offsets import Beginnings, Fetched
from rocketstore.client.group_options import GroupOptions
from rocketstore.client.shares import GroupDelivery, QueueName
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.pb import broker_pb2 as pb
from rocketstore.state.changes import TopicConfig
from tests.support.fake_broker import FakeBrokers
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_grpc import test_access
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness


@pytest.fixture
def broker() -> Iterator[RemotingHarness]:
    with RemotingHarness() as harness:
        harness.state.table["%RETRY%g"] = TopicConfig("%RETRY%g", 1, 1)
        yield harness


class Seen:
    """A handler that remembers."""

    def __init__(self, then: Callable[[GroupDelivery], None] = lambda _: None) -> None:
        self.bodies: list[bytes] = []
        self.queues: set[int] = set()
        self._then = then

    def __call__(self, delivery: GroupDelivery) -> None:
        self.bodies.append(delivery.body)
        self.queues.add(delivery.message.queue_id)
        self._then(delivery)


def member(
    broker: RemotingHarness, handler: Seen | None = None, *, tags: str = "*", **settings: object
) -> GroupConsumer:
    """Of group g, from the first message on unless ``settings`` say otherwise."""
    options = GroupOptions(**{"start": "first", "timeout_s": 15.0, "commit_s": 0.05, "pull_wait_ms": 200, **settings})  # type: ignore[arg-type]
    made = GroupConsumer([broker.address], group="g", options=options)
    made.subscribe("T", tags)
    made.start(handler)
    return made


def put(broker: RemotingHarness, count: int, begin: int = 0, tags: str = "") -> list[bytes]:
    """Messages in four queues, in turn."""
    bodies = [b"%d" % number for number in range(begin, begin + count)]
    properties = {"TAGS": tags} if tags else {}
    results = broker.send(
        *(pb.Message(topic="T", body=one, queue_id=int(one) % 4, properties=properties) for one in bodies)
    )
    assert {one.status for one in results} == {"PUT_OK"}
    return bodies


def committed(broker: RemotingHarness) -> dict[int, int]:
    """By queue."""
    found = dict(broker.state.committed)
    return {queue_id: offset for (_, topic, queue_id), offset in found.items() if topic == "T"}


def stored(broker: RemotingHarness) -> list[Message]:
    return [decode_record(one.record) for one in broker.store.log.records]


def queues_of(*members: GroupConsumer) -> list[list[int]]:
    return [[one.queue_id for one in each.queues if one.topic == "T"] for each in members]


def test_one_member_gets_all_and_commits_it(broker: RemotingHarness) -> None:
    """Before and after it joined."""
    sent, seen = put(broker, 40), Seen()
    with member(broker, seen) as one:
        wait_until(lambda: len(seen.bodies) == 40, "all came")
        sent += put(broker, 4, 40)
        wait_until(lambda: len(seen.bodies) == 44, "the others, too")
        wait_until(lambda: committed(broker) == dict.fromkeys(range(4), 11), "it commits while it runs")
        assert queues_of(one) == [[0, 1, 2, 3]]
    assert Counter(seen.bodies) == Counter(sent)


def test_members_divide_the_queues_and_take_them_over(broker: RemotingHarness) -> None:
    """Nothing twice once each has its share, and nothing is missing after one left."""
    first, second = Seen(), Seen()
    with member(broker, first) as one:
        with member(broker, second) as two:
            wait_until(lambda: sorted(queues_of(one, two)) == [[0, 1], [2, 3]], "they share")
            sent = put(broker, 40)
            wait_until(lambda: len(first.bodies) + len(second.bodies) == 40, "all came")
            assert not first.queues & second.queues
        wait_until(lambda: queues_of(one) == [[0, 1, 2, 3]], "it takes over")
        sent += put(broker, 40, 40)
        wait_until(lambda: len(first.bodies) + len(second.bodies) == 80, "all came")
    assert Counter(first.bodies + second.bodies) == Counter(sent)


def test_a_member_shares_the_queues_with_rocketmqs_clients(broker: RemotingHarness) -> None:
    """Each takes its run of them in the order of the ids, and all again once the other is gone."""
    with member(broker) as one:
        with broker.dial() as java:
            java.subscribe("g", "T", client_id="!first")
            wait_until(lambda: queues_of(one) == [[2, 3]], "the second half is ours")
            java.subscribe("g", "T", client_id="~last")
            wait_until(lambda: queues_of(one) == [[0, 1]], "the first half is")
        wait_until(lambda: queues_of(one) == [[0, 1, 2, 3]], "all are")


def test_more_members_than_queues(broker: RemotingHarness) -> None:
    """The fifth waits; when another leaves, it has work."""
    members = [member(broker) for _ in range(5)]
    try:
        wait_until(lambda: sorted(map(len, queues_of(*members))) == [0, 1, 1, 1, 1], "one has none")
        members.pop(next(at for at, each in enumerate(queues_of(*members)) if each)).close()
        wait_until(lambda: sorted(queues_of(*members)) == [[0], [1], [2], [3]], "each has one")
    finally:
        for one in members:
            one.close()


def test_only_done_messages_are_committed(broker: RemotingHarness) -> None:
    """In whatever order they are done: what is before the first that is in use."""
    put(broker, 12)  # three in each queue
    with member(broker) as one:
        deliveries = [one.receive(15.0) for _ in range(12)]
        mine = [each for each in deliveries if each is not None and each.message.queue_id == 0]
        for each in reversed(mine[1:]):
            one.ack(each)
        one.commit()
        assert committed(broker)[0] == 0
        one.ack(mine[0])
        one.ack(mine[0])
        one.commit()
        assert committed(broker) == {0: 3, 1: 0, 2: 0, 3: 0}
    with member(broker) as two:
        again = [two.receive(15.0) for _ in range(9)]
        assert {each.message.queue_id for each in again if each is not None} == {1, 2, 3}


def test_what_waits_for_an_ack_is_limited(broker: RemotingHarness) -> None:
    """In messages of each queue; with room, it goes on."""
    put(broker, 40)
    with member(broker, pending_messages_max=2) as one:
        wait_until(lambda: sum(one.lag().values()) == 40, "it has pulled")
        taken = [one.receive(15.0) for _ in range(8)]
        assert Counter(each.message.queue_id for each in taken if each) == Counter({0: 2, 1: 2, 2: 2, 3: 2})
        assert one.receive(0.3) is None
        assert taken[0] is not None
        one.ack(taken[0])
        more = one.receive(15.0)
        assert more is not None
        assert more.message.queue_id == taken[0].message.queue_id


def test_a_new_group_begins_behind_what_there_is_and_misses_nothing_after(broker: RemotingHarness) -> None:
    """Also if the first member ends before it committed anything by itself."""
    put(broker, 8)
    member(broker, start="last", commit_s=60.0).close()
    assert committed(broker) == dict.fromkeys(range(4), 2)
    sent = put(broker, 8, 8)
    seen = Seen()
    with member(broker, seen, start="last"):
        wait_until(lambda: len(seen.bodies) == 8, "what was sent meanwhile")
    assert Counter(seen.bodies) == Counter(sent)


def test_a_queue_that_is_new_begins_with_its_first_message(broker: RemotingHarness) -> None:
    """It may have messages before a member notices it."""
    member(broker, start="last").close()
    broker.state.table["T"] = TopicConfig("T", 5, 5)
    broker.send(pb.Message(topic="T", body=b"new", queue_id=4))
    seen = Seen()
    with member(broker, seen, start="last"):
        wait_until(lambda: seen.bodies == [b"new"], "the message of the new queue")


def test_a_topic_that_is_made_anew_is_consumed_again(broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it was gone: the brokers whose addresses were given are never left."""
    monkeypatch.setattr("rocketstore.client.topic_cache.REFRESH_S", 0.05)
    monkeypatch.setattr("rocketstore.client.group_branch.REBALANCE_S", 0.2)
    for name, seconds in (("LOOK_S", 0.05), ("MISSING_TOPIC_S", 0.05), ("RETIRE_S", -1.0)):
        monkeypatch.setattr(f"rocketstore.client.group_division.{name}", seconds)
    seen = Seen()
    with member(broker, seen) as one:
        division = one._division
        assert division is not None
        topic = broker.state.table.pop("T")
        wait_until(lambda: "T" in division._missing, "it is gone")
        broker.state.table["T"] = topic
        wait_until(lambda: "T" not in division._missing, "it is found again")
        sent = put(broker, 4)
        wait_until(lambda: sorted(seen.bodies) == sorted(sent), "its messages come")


@pytest.mark.parametrize(
    ("topic", "tags", "words"),
    [("T", "b", "subscribe to topic T with different tags"), ("U", "a", "subscribe to different topics")],
)
def test_a_member_that_subscribes_otherwise_than_its_group_is_warned_at_its_start(
    caplog: pytest.LogCaptureFixture, topic: str, tags: str, words: str
) -> None:
    """Messages are missed then. Members that were there before hear of it, too, and each says it once."""

    def warnings() -> list[str]:
        records = [one for one in caplog.records if one.name.startswith("rocketstore.client")]
        return [one.getMessage() for one in records if one.levelname == "WARNING" and "group g" in one.getMessage()]

    topics = (TopicConfig("T", 4, 4), TopicConfig("U", 4, 4), TopicConfig("%RETRY%g", 1, 1))
    with RemotingHarness(None, *topics) as broker, member(broker, tags="a"), member(broker, tags="a"):
        assert warnings() == []
        with GroupConsumer([broker.address], group="g", timeout_s=15.0) as other:
            other.subscribe(topic, tags)
            other.start()
            assert any(words in one and other.client_id in one for one in warnings())
            wait_until(lambda: len(warnings()) == 3, "the others are warned")
            assert all("Give each subscription a group of its own" in one for one in warnings())


def test_tags_are_chosen(broker: RemotingHarness) -> None:
    """And the others count as done."""
    put(broker, 8, tags="A")
    sent = put(broker, 8, 8, tags="B")
    seen = Seen()
    with member(broker, seen, tags="B || C"):
        wait_until(lambda: len(seen.bodies) == 8, "those with the tag")
        put(broker, 4, 16, tags="A")
        wait_until(lambda: committed(broker) == dict.fromkeys(range(4), 5), "the others are passed over")
    assert Counter(seen.bodies) == Counter(sent)


def test_a_failing_message_is_sent_back_and_the_others_go_on(broker: RemotingHarness) -> None:
    """With the group's next delay; afterwards it counts as done, because the broker has it."""

    def fail(delivery: GroupDelivery) -> None:
        if delivery.body == b"1" and not delivery.attempts:  # this store does not delay
            raise ValueError("scripted")

    seen = Seen(fail)
    put(broker, 8)
    with member(broker, seen):
        wait_until(lambda: committed(broker) == dict.fromkeys(range(4), 2), "all is done")
    retried = [one for one in stored(broker) if one.properties.get("RETRY_TOPIC")]
    assert [(one.body, one.topic, one.properties["DELAY"]) for one in retried] == [(b"1", "%RETRY%g", "3")]


def test_a_message_that_comes_again_says_where_it_is_from(broker: RemotingHarness) -> None:
    """And how often it was tried; after the last time it is dead."""
    message = pb.Message(topic="%RETRY%g", body=b"x", queue_id=0, properties={"RETRY_TOPIC": "T"}, reconsume_times=2)
    broker.send(message)
    with member(broker, retries_max=2) as one:
        delivery = one.receive(15.0)
        assert delivery is not None
        assert (delivery.topic, delivery.attempts, delivery.body) == ("T", 2, b"x")
        one.send_back(delivery)
        assert stored(broker)[-1].topic == "%DLQ%g"
        one.send_back(delivery)
        assert len(stored(broker)) == 2


def test_a_message_that_is_not_taken_back_is_tried_again_here(
    broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost because its repetition was refused."""
    monkeypatch.setattr("rocketstore.client.group_consumer.AGAIN_S_MIN", 0.05)
    put(broker, 1)
    with member(broker) as one:
        delivery = one.receive(15.0)
        assert delivery is not None
        monkeypatch.setattr(broker.store, "read_record", lambda _: None)
        one.send_back(delivery)
        again = one.receive(15.0)
        assert again is not None
        assert (again.body, again.attempts) == (b"0", 1)
        one.commit()
        assert committed(broker)[0] == 0


def test_in_order_one_message_of_a_queue_at_a_time(broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing one is tried again before the next; other queues do not wait for it."""
    monkeypatch.setattr(group_consumer, "ORDERED_PAUSE_S", 0.05)
    running: Counter[int] = Counter()
    failures = Counter[bytes]()
    lock = threading.Lock()

    def work(delivery: GroupDelivery) -> None:
        with lock:
            running[delivery.message.queue_id] += 1
            assert running[delivery.message.queue_id] == 1
        with lock:
            running[delivery.message.queue_id] -= 1
            failures[delivery.body] += 1
        if int(delivery.body) % 10 == 0 and failures[delivery.body] < 3:
            raise ValueError("scripted")

    seen = Seen(work)
    sent = put(broker, 40)
    with member(broker, seen, ordered=True):
        wait_until(lambda: committed(broker) == dict.fromkeys(range(4), 10), "all is done")
    for queue_id in range(4):
        mine = [int(one) for one in seen.bodies if int(one) % 4 == queue_id]
        assert mine == sorted(mine)
    assert set(seen.bodies) == set(sent)
    assert {body: number for body, number in failures.items() if number > 1} == {
        b"0": 3,
        b"10": 3,
        b"20": 3,
        b"30": 3,
    }


def test_in_order_a_message_is_dead_after_its_last_time(
    broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there is a limit; then the queue goes on."""
    monkeypatch.setattr(group_consumer, "ORDERED_PAUSE_S", 0.02)

    def fail(delivery: GroupDelivery) -> None:
        if delivery.body == b"0":
            raise ValueError("scripted")

    seen = Seen(fail)
    put(broker, 8)
    with member(broker, seen, ordered=True, retries_max=2):
        wait_until(lambda: committed(broker) == dict.fromkeys(range(4), 2), "all is done")
    assert seen.bodies.count(b"0") == 3
    assert stored(broker)[-1].topic == "%DLQ%g"


def test_a_queue_is_handed_over_only_after_the_message_in_use(broker: RemotingHarness) -> None:
    """In order, two members never have messages of one queue at once."""
    put(broker, 4)
    with member(broker, ordered=True) as one:
        held = {each.message.queue_id: each for each in (one.receive(15.0) for _ in range(4)) if each}
        assert set(held) == {0, 1, 2, 3}
        with member(broker, ordered=True) as two:
            wait_until(lambda: len(queues_of(one)[0]) == 2, "it gave half of them up")
            lost = sorted(set(range(4)) - set(queues_of(one)[0]))
            assert two.receive(0.5) is None
            one.ack(held[lost[0]])
            wait_until(lambda: queues_of(two)[0] == [lost[0]], "the queue whose message is done")
            assert committed(broker)[lost[0]] == 1
            one.ack(held[lost[1]])
            wait_until(lambda: queues_of(two)[0] == lost, "and the other")
            assert two.receive(0.3) is None


def test_a_lock_of_another_member_is_respected(broker: RemotingHarness) -> None:
    """Until it is given back, or has expired."""
    put(broker, 4)
    locks = broker.groups._locks
    theirs = (("T", 2),)

    async def lock() -> None:
        locks.lock("g", "java", theirs)

    broker.bridge.run(lock())
    with member(broker, ordered=True) as one:
        assert queues_of(one) == [[0, 1, 3]]
        locks._now = lambda: 1e9 + 2 * LOCK_S
        wait_until(lambda: queues_of(one) == [[0, 1, 2, 3]], "the lock has expired")


def test_a_message_that_fails_while_its_brokers_are_left_is_not_done(broker: RemotingHarness) -> None:
    """Nobody takes it back any more, so it must come again: it is not committed."""
    put(broker, 4)
    with member(broker, commit_s=3600.0) as one:
        delivery = one.receive(15.0)
        assert delivery is not None
        division = one._division
        assert division is not None
        branches, division._branches = division._branches, {}
        one.send_back(delivery)
        division._branches = branches
        assert delivery.progress.done == 0
        assert len(stored(broker)) == 4


def branch_of(one: GroupConsumer) -> Branch:
    """The only one, whose thread commits nothing if that is an hour away."""
    assert one._division is not None
    (branch,) = one._division.branches()
    return branch


def unavailable(*_args: object, **_settings: object) -> NoReturn:
    raise UnavailableError("scripted")


def test_a_message_that_is_not_taken_back_before_the_end_is_not_done(
    broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else closing would commit it, and nobody would ever see it again."""
    put(broker, 4)
    with member(broker, commit_s=3600.0) as one:
        delivery = one.receive(15.0)
        assert delivery is not None

        def fails(_request: pb.SendBackRequest) -> NoReturn:
            one._closing.set()
            unavailable()

        monkeypatch.setattr(branch_of(one), "put_back", fails)
        one.send_back(delivery)
        assert delivery.progress.done == 0
        one._closing.clear()


def test_a_queue_that_moved_back_is_not_sent_forward_by_its_old_offset(
    broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The brokers lost the queue's end, and the group's offset is behind it: messages up to there are to come."""
    with member(broker, commit_s=3600.0) as one:
        branch, name = branch_of(one), QueueName("T", 0)
        share = branch._held()[name]
        share.rewind, share.committed = True, 7
        commits: list[tuple[int | None, bool]] = []
        monkeypatch.setattr(branch._store, "fetch", lambda _topics: Fetched({name: 9}))
        monkeypatch.setattr(
            branch._store, "commit", lambda places, _incarnation, *, rewind: commits.append((places.get(name), rewind))
        )
        branch._adopt_and_commit()
        assert (share.progress.next, share.rewind) == (0, False)
        assert (0, True) in commits


def test_queues_that_could_not_be_taken_are_unlocked(broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would wait for them for a minute."""
    with member(broker, ordered=True, commit_s=3600.0) as one:
        branch = branch_of(one)
        monkeypatch.setattr(branch.beginnings, "of", unavailable)
        with pytest.raises(UnavailableError):
            branch._gain(Assignment(), [QueueName("U", 0)])
        assert not [key for key in broker.groups._locks._locks if key[1] == "U"]


def test_a_renewal_keeps_what_it_got_and_what_is_being_left(broker: RemotingHarness) -> None:
    """A queue that another member has locked meanwhile is given up; one whose message is in use stays locked."""
    put(broker, 4)
    with member(broker, ordered=True, commit_s=3600.0) as one:
        branch, locks = branch_of(one), broker.groups._locks
        held = {found.message.queue_id: found for found in (one.receive(15.0) for _ in range(4)) if found is not None}
        branch._release([held[1].share])
        theirs = (("T", 2),)

        async def lock() -> None:
            locks.unlock("g", one.client_id, theirs)
            locks.lock("g", "other", theirs)

        broker.bridge.run(lock())
        for share in branch._held().values():
            share.usable_until = 0.0
        renewed_at = locks._locks["g", "T", 1].renewed_at
        branch._renew()
        assert [held[number].share.usable_until > 0 for number in (0, 2, 3)] == [True, False, True]
        assert QueueName("T", 2) not in branch._held()
        assert locks._locks["g", "T", 1].renewed_at > renewed_at
        for each in held.values():
            one.ack(each)


def test_a_queue_is_left_only_once_its_offset_is_committed(
    broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, the next member would begin with messages that are done."""
    with member(broker, ordered=True, commit_s=3600.0) as one:
        branch = branch_of(one)
        share = branch._held()[QueueName("T", 0)]
        commit = branch._store.commit
        share.progress.skip_to(7)
        monkeypatch.setattr(branch._store, "commit", unavailable)
        with pytest.raises(UnavailableError):
            branch._release([share])
        assert (branch._leaving, share.progress.abandoned) == ([share], False)
        monkeypatch.setattr(branch._store, "commit", commit)
        branch._finish_leaving()
        assert branch._leaving == []


def test_a_member_that_is_slower_moves_no_offset() -> None:
    """Another one began, and messages were sent, while it looked: the group has to see them."""

    class Store:
        def fetch(self, topics: Collection[str]) -> Fetched:
            return Fetched({QueueName("T", 1, "b"): 5} if "T" in topics else {})

        def commit(self, offsets: Mapping[QueueName, int], incarnation: int, *, rewind: bool = False) -> None:
            kept.append((dict(offsets), rewind))

    kept: list[tuple[dict[QueueName, int], bool]] = []
    beginnings = Beginnings(cast("BrokerConnection", None), Store(), "b")
    beginnings.begin({QueueName("T", 0, "b"): 9, QueueName("T", 1, "b"): 9, QueueName("U", 0, "b"): 3})
    assert kept == [({QueueName("U", 0, "b"): 3}, False)]


def test_a_commit_meanwhile_is_not_taken_for_a_reset(broker: RemotingHarness) -> None:
    """What the brokers said before it is older: the queue would go back to there."""
    put(broker, 8)
    with member(broker, commit_s=3600.0) as one:
        held = [found for _ in range(8) if (found := one.receive(15.0)) is not None]
        assert len(held) == 8
        for each in held[:4]:
            one.ack(each)
        one.commit()
        assert one._division is not None
        (branch,) = one._division.branches()
        store, fetch = branch._store, branch._store.fetch

        def fetch_slowly(topics: Collection[str]) -> Fetched:
            found = fetch(topics)
            for each in held[4:]:
                one.ack(each)
            if branch._committing.acquire(blocking=False):
                branch._committing.release()
                one.commit()
            return found

        store.fetch = fetch_slowly  # type: ignore[method-assign]  # on this object alone
        branch._adopt_and_commit()
        assert {share.progress.done for name, share in branch._held().items() if name.topic == "T"} == {2}
        assert committed(broker) == dict.fromkeys(range(4), 2)


def test_a_broadcast_reaches_every_member_and_each_keeps_its_own_place(broker: RemotingHarness, tmp_path: Path) -> None:
    """In a file; the brokers hear of no offset, and a failing message does not come again."""

    def fail(delivery: GroupDelivery) -> None:
        raise ValueError("scripted")

    sent = put(broker, 8)
    first, second = Seen(), Seen(fail)
    file = tmp_path / "offsets.json"
    with member(broker, first, broadcast=True, offsets_file=file), member(broker, second, broadcast=True):
        wait_until(lambda: len(first.bodies) == len(second.bodies) == 8, "both got all")
    sent += put(broker, 8, 8)
    with member(broker, first, broadcast=True, offsets_file=file):
        wait_until(lambda: len(first.bodies) == 16, "it goes on where it was")
    assert Counter(first.bodies) == Counter(sent)
    assert not broker.state.committed
    file.write_text("[1]")
    with pytest.raises(ConfigError, match=r"offsets\.json does not contain offsets"):
        member(broker, broadcast=True, offsets_file=file)


def test_offsets_that_were_reset_are_adopted(broker: RemotingHarness) -> None:
    """As the other consumer does."""
    put(broker, 8)
    seen = Seen()
    with member(broker, seen):
        wait_until(lambda: committed(broker) == dict.fromkeys(range(4), 2), "all is done")
        broker.state.committed["g", "T", 1] = 0
        wait_until(lambda: seen.bodies.count(b"1") == 2, "it goes back")
        wait_until(lambda: committed(broker) == dict.fromkeys(range(4), 2), "and commits again")


def test_what_cannot_work_is_said_at_the_start(broker: RemotingHarness) -> None:
    """No topic, no subscription, no group, no permission, no broker."""
    with pytest.raises(ConfigError, match="group"):
        GroupConsumer([broker.address], group="")
    with pytest.raises(ConfigError, match="broadcast"):
        GroupOptions(offsets_file=Path("x"))
    with GroupConsumer([broker.address], group="g") as one:
        with pytest.raises(ConfigError, match="subscribe"):
            one.start()
        one.subscribe("unknown")
        with pytest.raises(NotFoundError):
            one.start()
    with member(broker) as two, pytest.raises(ConfigError, match="before start"):
        two.subscribe("more")
    with pytest.raises(UnavailableError):
        two.start()


def test_only_the_master_must_know_groups(brokers: FakeBrokers) -> None:
    """A slave of an older version, which will be upgraded next, keeps nobody from joining."""
    master, *slaves = brokers.nodes
    master.fail_calls["Membership"] = deque([(grpc.StatusCode.UNAVAILABLE, "not yet", {})] * 8)
    for slave in slaves:
        slave.fail_calls["Membership"] = deque([(grpc.StatusCode.UNIMPLEMENTED, "older", {})] * 10_000)
    with GroupConsumer(brokers.addresses[::-1], group="g", timeout_s=60.0) as one:
        one.subscribe("orders")
        one.start()
        assert len(one.queues) == 4
    slaves[0].fail_calls["Membership"].clear()
    master.fail_calls["Membership"] = deque([(grpc.StatusCode.UNIMPLEMENTED, "older", {})] * 10_000)
    with GroupConsumer(brokers.addresses, group="g", timeout_s=15.0) as two:
        two.subscribe("orders")
        with pytest.raises(InvalidRequestError, match="older"):
            two.start()


def test_a_group_that_is_not_permitted(tmp_path: Path) -> None:
    """The broker's reason, at once."""
    with test_access.harness() as broker:
        one = GroupConsumer([broker.address], group="other", security=test_access.ALICE, timeout_s=15.0)
        one.subscribe("T")
        with pytest.raises(AccessDeniedError, match="needs SUB on group other"):
            one.start()
        with GroupConsumer([broker.address], group="g", security=test_access.ALICE, timeout_s=15.0) as two:
            two.subscribe("T")
            two.start()
            assert [one for one in two.queues if one.topic == "T"] == [QueueName("T", one) for one in range(4)]
