"""The client for threads, against fake nodes behind real ports."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dledger.client import AppendResult, ClientSecurity, DLedgerClient, MemberRole, ReadMode, member_change
from dledger.client.shared import TimeLimit
from dledger.config import ServerConfig
from dledger.errors import (
    ConfigError,
    DLedgerError,
    EmptyBatchError,
    EntryTooLargeError,
    IdentityError,
    IndexOutOfRangeError,
    InvalidRequestError,
    LeaderHint,
    LeaderNotReadyError,
    NotLeaderError,
    PendingFullError,
    RequestTimeoutError,
    StaleConfigurationError,
    TermChangedError,
    UnavailableError,
)
from dledger.rpc.peers.transport import PeerTransport
from dledger.types import ANY_CONFIGURATION, NodeId, Role
from dledger_cli.local.group import free_ports
from tests.support.fake_group import FakeGroup, fake_group
from tests.support.receiver import RecordingReceiver
from tests.support.waiting import wait_until


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    with fake_group() as made:
        yield made


@pytest.fixture
def client(group: FakeGroup) -> Iterator[DLedgerClient]:
    with DLedgerClient(group.addresses) as made:
        yield made


@pytest.fixture
def plain(group: FakeGroup) -> Iterator[DLedgerClient]:
    """A client whose appends are not known again when they are repeated."""
    with DLedgerClient(group.addresses, enable_idempotence=False) as made:
        yield made


def test_append_returns_where_the_entry_is(client: DLedgerClient, group: FakeGroup) -> None:
    """Index, term and position."""
    first, second = client.append(b"a"), client.append(b"bc")

    assert first == AppendResult(first.index, group.nodes[0].term, first.position)
    assert (first.index, second.index, second.position) == (0, 1, 49)
    assert group.nodes[0].bodies() == [b"a", b"bc"]


def test_appends_are_numbered_unless_told_otherwise(
    client: DLedgerClient, plain: DLedgerClient, group: FakeGroup
) -> None:
    """So that what is repeated is stored once."""
    plain.append(b"a")
    assert not group.nodes[0].producers
    client.append(b"b")
    assert len(group.nodes[0].producers) == 1


def test_append_finds_the_leader_from_any_address(group: FakeGroup) -> None:
    """One follower's address is enough, also beside one that leads nowhere; the rest is learnt."""
    nowhere = f"127.0.0.1:{free_ports(1)[0]}"
    with DLedgerClient([group.addresses[2], nowhere]) as client:
        assert set(client.members_status()) == {"n0", "n1", "n2"}
        assert all(not isinstance(one, DLedgerError) for one in client.members_status().values())
    with DLedgerClient(group.addresses[2]) as client:
        assert client.append(b"a").index == 0
        assert set(client.members_status()) == {"n0", "n1", "n2"}


def test_append_follows_a_new_leader(client: DLedgerClient, group: FakeGroup) -> None:
    """NotLeader is not applied: the hint is followed at once."""
    client.append(b"a")
    group.elect(1)

    assert client.append(b"b").index == 1
    assert group.nodes[1].bodies() == [b"a", b"b"]


def test_nodes_are_found_where_they_answer() -> None:
    """From outside their network, what they say of themselves leads nowhere: no channel is opened to that."""
    with (
        fake_group(advertised=[f"n{number}.invalid:30911" for number in range(3)]) as group,
        DLedgerClient(group.addresses) as client,
    ):
        for leader in (0, 1, 2):
            group.elect(leader)
            assert client.append(b"a").index == leader
            assert group.nodes[leader].bodies() == [b"a"] * (leader + 1)

        answers = client.members_status()
        assert not [one for one in answers.values() if isinstance(one, DLedgerError)]
        assert [entry.body for entry in client.read(0)] == [b"a"] * 3
        assert set(client._client._connections._links) == set(group.addresses)


def test_append_survives_a_killed_leader(client: DLedgerClient, group: FakeGroup) -> None:
    """Retried until the group has a leader again."""
    client.append(b"a")
    group.kill(0)
    wait_until(lambda: group.addresses[0] not in client._client._connections._links, "the loss to be noticed")
    electing = threading.Timer(0.3, group.elect, [2])
    electing.start()

    result = client.append(b"b")
    electing.join()

    assert result.index == 1
    assert group.nodes[2].bodies() == [b"a", b"b"]


@pytest.mark.parametrize("error", [LeaderNotReadyError("x"), PendingFullError("x")])
def test_append_retries_what_passes(client: DLedgerClient, group: FakeGroup, error: DLedgerError) -> None:
    """The same leader, after a pause."""
    group.nodes[0].fail_appends = [error, error]

    assert client.append(b"a").index == 0


def test_append_without_idempotence_does_not_retry_an_unknown_outcome(plain: DLedgerClient, group: FakeGroup) -> None:
    """It may be in the log already."""
    group.nodes[0].fail_appends = [TermChangedError("lost")]

    with pytest.raises(TermChangedError) as caught:
        plain.append(b"a")

    assert caught.value.outcome == "unknown"
    assert group.nodes[0].bodies() == []


def test_append_that_gets_no_answer_is_unknown(client: DLedgerClient, group: FakeGroup) -> None:
    """The deadline says nothing about the entry."""
    client.append(b"a")
    group.nodes[0].hold = True

    with pytest.raises(RequestTimeoutError) as caught:
        client.append(b"b", timeout_s=0.2)
    group.nodes[0].release()

    assert caught.value.outcome == "unknown"


def test_append_without_idempotence_at_a_broken_stream_is_unknown(plain: DLedgerClient, group: FakeGroup) -> None:
    """Sent, and the node is gone: only the log knows."""
    client = plain
    client.append(b"a")
    group.nodes[0].hold = True
    errors: list[DLedgerError] = []

    def append() -> None:
        try:
            client.append(b"b")
        except DLedgerError as error:
            errors.append(error)

    thread = threading.Thread(target=append)
    thread.start()
    wait_until(lambda: len(group.nodes[0].held) == 1, "in flight")
    group.kill(0)
    thread.join()

    assert isinstance(errors[0], RequestTimeoutError)
    assert errors[0].outcome == "unknown"


def test_close_ends_an_append_in_another_thread(group: FakeGroup) -> None:
    """At once, not at its deadline; nobody knows whether it is stored."""
    client = DLedgerClient(group.addresses, timeout_s=300)
    client.append(b"a")
    group.nodes[0].hold = True
    errors: list[DLedgerError] = []

    def append() -> None:
        try:
            client.append(b"b")
        except DLedgerError as error:
            errors.append(error)

    thread = threading.Thread(target=append, daemon=True)
    thread.start()
    wait_until(lambda: len(group.nodes[0].held) == 1, "in flight")
    client.close()
    thread.join(60)

    assert not thread.is_alive()
    assert errors[0].outcome == "unknown"
    assert str(errors[0]).endswith(": the client is closed")


def test_append_without_any_node_is_not_applied() -> None:
    """Nothing was sent; the error names the addresses and why."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    started = time.monotonic()

    with DLedgerClient(address, timeout_s=2) as client, pytest.raises(UnavailableError) as caught:
        client.append(b"a")

    assert caught.value.outcome == "not_applied"
    assert address in str(caught.value)
    assert 1.9 < time.monotonic() - started < 30


def test_a_silent_leader_does_not_take_the_time_of_those_who_would_say_more(group: FakeGroup) -> None:
    """However long the whole question may last: each is waited for as long as the client usually waits."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with DLedgerClient([address, *group.addresses], timeout_s=0.5) as client:
            client._client._directory.set_leader(address)
            began = time.monotonic()

            assert client.metadata(timeout_s=300).node_id in ("n0", "n1", "n2")
            assert time.monotonic() - began < 60


def test_append_to_a_silent_node_keeps_its_deadline() -> None:
    """A node that accepts and says nothing (SIGSTOP) is not waited for longer."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started = time.monotonic()

        with DLedgerClient(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5) as client:
            with pytest.raises(UnavailableError):
                client.append(b"a")
            with pytest.raises((UnavailableError, RequestTimeoutError)):
                client.read(0)

        assert time.monotonic() - started < 60


def test_append_without_a_leader_says_so(client: DLedgerClient, group: FakeGroup) -> None:
    """Every node answers, and none leads."""
    for node in group.nodes:
        node.leader = LeaderHint(NodeId("n9"))

    with pytest.raises((UnavailableError, NotLeaderError)) as caught:
        client.append(b"a", timeout_s=0.3)

    assert caught.value.outcome == "not_applied"


def test_append_many_is_split_in_order(client: DLedgerClient, group: FakeGroup) -> None:
    """Each request is all or nothing, and within the limits."""
    bodies = [b"%d" % number for number in range(2500)]
    large = [b"x" * (700 << 10)] * 3

    results = client.append_many(bodies)
    client.append_many(large)

    assert [result.index for result in results] == list(range(2500))
    assert group.nodes[0].bodies() == bodies + large
    assert [len(batch) for batch in group.nodes[0].batches] == [1024, 1024, 452, 1, 1, 1]


def test_append_many_that_fails_midway_is_unknown(client: DLedgerClient, group: FakeGroup) -> None:
    """Repeating all of it would repeat the first part."""
    group.nodes[0].fail_appends = [None, EntryTooLargeError("x")]

    with pytest.raises(EntryTooLargeError) as caught:
        client.append_many([b"x"] * 2000)

    assert caught.value.outcome == "unknown"
    assert caught.value.__notes__ == ["the first 1024 entries were appended; the next request failed"]
    with pytest.raises(EmptyBatchError):
        client.append_many([])


def test_limits_are_named_errors() -> None:
    """An entry over the limit, and a request over the transport's."""
    with fake_group(1, max_entry_bytes=1000) as group, DLedgerClient(group.addresses) as client:
        with pytest.raises(EntryTooLargeError, match="max_entry_bytes=1000"):
            client.append(b"x" * 1000)
        with DLedgerClient(group.addresses, timeout_s=0.5) as hasty, pytest.raises(DLedgerError):
            hasty.append(b"x" * (9 << 20))
        assert client.append(b"x").index == 0


def test_read_gives_entries(client: DLedgerClient, group: FakeGroup) -> None:
    """In all modes, at all nodes, bounded."""
    client.append_many([b"a", b"b", b"c"])

    assert [entry.body for entry in client.read(1)] == [b"b", b"c"] or group.nodes[1].committed == -1
    for mode in ReadMode:
        assert [entry.body for entry in client.read(0, count=2, mode=mode, address=group.addresses[0])] == [b"a", b"b"]
    assert client.read(3, address=group.addresses[0]) == []
    with pytest.raises(IndexOutOfRangeError):
        client.read(9, address=group.addresses[0])


def test_linearizable_read_follows_the_leader(client: DLedgerClient, group: FakeGroup) -> None:
    """Only the leader answers it."""
    client.append(b"a")
    group.elect(1)

    assert [entry.body for entry in client.read(0, mode=ReadMode.LINEARIZABLE)] == [b"a"]
    with pytest.raises(NotLeaderError):
        client.read(0, mode=ReadMode.LINEARIZABLE, address=group.addresses[0], timeout_s=0.2)


@pytest.mark.parametrize("last", [RequestTimeoutError("silence"), UnavailableError("not connected within 0 s")])
def test_what_a_node_said_tells_more_than_the_last_attempt_that_was_cut_short(
    client: DLedgerClient, group: FakeGroup, monkeypatch: pytest.MonkeyPatch, last: DLedgerError
) -> None:
    """The deadline ends a call wherever it is. Not so for what may have been carried out."""
    answers: Iterator[DLedgerError] = itertools.cycle([NotLeaderError("not here"), last])

    async def call(_address: str, _code: int, _body: bytes, deadline: TimeLimit, **_: bool) -> bytes:
        error = next(answers)
        while not isinstance(error, NotLeaderError) and not deadline.expired:
            await asyncio.sleep(0)
        raise error

    monkeypatch.setattr(client._client._connections, "call", call)
    with pytest.raises(NotLeaderError):
        client.read(0, address=group.addresses[0], timeout_s=0.2)
    client._client._directory.set_leader(group.addresses[0])
    answers = itertools.repeat(RequestTimeoutError("silence"))
    with pytest.raises(RequestTimeoutError):
        client.transfer_leadership(timeout_s=0.2)


def test_read_goes_to_a_node_that_lives(client: DLedgerClient, group: FakeGroup) -> None:
    """A dead node costs no error."""
    client.append(b"a")
    group.elect(1)
    group.kill(0)
    group.kill(2)

    for _ in range(4):
        assert [entry.body for entry in client.read(0)] == [b"a"]


def test_follow_survives_the_loss_of_its_node(client: DLedgerClient, group: FakeGroup) -> None:
    """Goes on at the next index, elsewhere: nothing twice, nothing left out."""
    client.append_many([b"0", b"1"])
    entries = client.follow(0)
    seen = [next(entries).body, next(entries).body]

    group.elect(1)
    client.append(b"2")
    group.kill(0)
    group.elect(1)  # n2 has it too now
    seen.append(next(entries).body)
    entries.close()

    assert seen == [b"0", b"1", b"2"]


def test_follow_ends_with_an_error_that_does_not_pass(client: DLedgerClient, group: FakeGroup) -> None:
    """And with UnavailableError when no node answers for the client's time-out."""
    with pytest.raises(IndexOutOfRangeError):
        next(client.follow(-1))
    client.append(b"a")
    with DLedgerClient(group.addresses, timeout_s=2.0) as hasty:
        entries = hasty.follow(0, address=group.addresses[0])
        next(entries)
        for number in range(3):
            group.kill(number)

        with pytest.raises(UnavailableError):
            next(entries)


def test_close_ends_a_follow_in_another_thread(group: FakeGroup) -> None:
    """So that a program can end."""
    client = DLedgerClient(group.addresses)
    errors: list[DLedgerError] = []
    client.append(b"a")
    entries = client.follow(0, address=group.addresses[0])
    next(entries)

    def follow() -> None:
        try:
            next(entries)
        except DLedgerError as error:
            errors.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    client.close()
    client.close()
    thread.join(60)

    assert not thread.is_alive()
    assert isinstance(errors[0], UnavailableError)
    with pytest.raises(UnavailableError, match="closed"):
        client.append(b"b")


def test_metadata_tells_the_status(client: DLedgerClient, group: FakeGroup) -> None:
    """Of the leader once it is known, or of the node asked."""
    client.append(b"a")

    assert client.metadata().role is Role.LEADER
    assert client.metadata(group.addresses[1]).node_id == "n1"


def test_members_status_tells_of_all(client: DLedgerClient, group: FakeGroup) -> None:
    """An answer or an error for each."""
    group.kill(2)

    answers = client.members_status()

    assert list(answers) == ["n0", "n1", "n2"]
    assert isinstance(answers[NodeId("n2")], UnavailableError)
    group.kill(0)
    group.kill(1)
    with pytest.raises(UnavailableError) as nobody:
        client.members_status()
    assert all(f"{one} is unreachable" in str(nobody.value) for one in group.addresses)


def test_watch_role_tells_changes(client: DLedgerClient, group: FakeGroup) -> None:
    """The present role first."""
    events = client.watch_role(group.addresses[1])

    first = next(events)
    group.elect(1)
    second = next(events)
    events.close()

    assert (first.role, second.role) == (Role.FOLLOWER, Role.LEADER)


def test_transfer_leadership_asks_the_leader(client: DLedgerClient, group: FakeGroup) -> None:
    """And returns the new one."""
    group.elect(2)

    assert client.transfer_leadership(NodeId("n1")).node_id == "n1"


def test_the_leader_is_asked_to_change_the_members(client: DLedgerClient, group: FakeGroup) -> None:
    """And tells how far each member is, wherever it was before."""
    group.elect(2)
    change = member_change("add", "n4", "127.0.0.1:9", replaces="n1")

    made = client.change_members(change)
    again = client.change_members(change)

    added = made.find("n4")
    assert added is not None
    assert (added.role, added.promote, added.replaces) == (MemberRole.LEARNER, True, "n1")
    assert (again, len(group.nodes[2].changes)) == (made, 1)
    status = client.leader_status()
    assert (status.node_id, status.configuration_index, status.change_id) == ("n2", made.index, change.change_id)


def test_a_change_that_was_decided_on_older_members_is_refused(client: DLedgerClient, group: FakeGroup) -> None:
    """Compare and swap: nothing is done."""
    before = client.leader_status().configuration_index
    client.change_members(member_change("add", "n4", "h:9", learner=True, expected_index=before))

    with pytest.raises(StaleConfigurationError):
        client.change_members(member_change("remove", "n4", expected_index=before))
    assert len(group.nodes[0].changes) == 1


@pytest.mark.parametrize(
    ("kind", "address"), [("add", ""), ("update", ""), ("remove", "h:1"), ("promote", "h:1"), ("ad", ""), ("add", "h")]
)
def test_a_change_that_makes_no_sense_is_not_sent(kind: str, address: str) -> None:
    """An address belongs to those who get one."""
    with pytest.raises(InvalidRequestError):
        member_change(kind, "n4", address)


def test_a_change_may_be_decided_on_the_very_first_configuration() -> None:
    """That of the entry 0; none means any."""
    assert member_change("remove", "n4", expected_index=0).expected_index == 0
    assert member_change("remove", "n4").expected_index == ANY_CONFIGURATION


def test_a_removed_member_is_not_a_lost_one(client: DLedgerClient, group: FakeGroup) -> None:
    """Who the members are is what the newest configuration says, whatever older ones say."""
    group.kill(2)
    assert isinstance(client.members_status()[NodeId("n2")], DLedgerError)

    client.change_members(member_change("remove", "n2"))

    assert set(client.members_status()) == {"n0", "n1"}


def test_a_wrong_group_is_told_at_once(group: FakeGroup) -> None:
    """No retry helps."""
    with (
        DLedgerClient(group.addresses, group="other", timeout_s=3600) as client,
        pytest.raises(IdentityError, match="not 'other'"),
    ):
        client.append(b"a")


def test_a_peer_port_is_recognised() -> None:
    """The most likely mistake gets the most helpful message."""
    port = free_ports(1)[0]
    config = ServerConfig(client_port=0)
    member = config.members[0]
    config = ServerConfig(members=(type(member)(member.node_id, "127.0.0.1", port),), client_port=0)
    transport = PeerTransport(config)
    transport.start(RecordingReceiver())

    with DLedgerClient(f"127.0.0.1:{port}", timeout_s=1) as client, pytest.raises(UnavailableError, match="peer port"):
        client.append(b"a")

    transport.close()


def test_addresses_must_be_given() -> None:
    """As one text or a sequence."""
    with pytest.raises(ConfigError, match="no address given"):
        DLedgerClient(" , ")
    with DLedgerClient("a:1; b:2,a:1", security=ClientSecurity(insecure=True)) as client:
        assert client._client._directory.addresses == ("a:1", "b:2")


def test_a_node_that_hangs_leaves_the_others_time_to_answer_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever only reads knows no leader and asks all in turn: each third read would fail."""
    times_s: list[float] = []

    async def hang(address: str, _code: int, _body: bytes, deadline: TimeLimit) -> bytes:
        times_s.append(deadline.remaining_s)
        if len(times_s) < 3:
            raise RequestTimeoutError(f"no answer from {address} in time")
        raise IndexOutOfRangeError("there is no such entry")

    with DLedgerClient(["n0:1", "n1:1", "n2:1"], timeout_s=1000, security=ClientSecurity(insecure=True)) as client:
        monkeypatch.setattr(client._client._connections, "call", hang)
        with pytest.raises(IndexOutOfRangeError):
            client.read(0)

    assert max(times_s[:2]) <= 500 < times_s[2]
