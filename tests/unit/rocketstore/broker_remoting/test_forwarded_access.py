"""Requests that a slave passes on, under access control: both brokers check them, and nobody may pretend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dledger.access.rules import parse_rules
from dledger.remoting.frame import signed
from rocketstore.broker.mastership import GroupView
from rocketstore.broker_remoting.access import BORN_HOST
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.types import BrokerRole
from tests.support.remoting import RemotingSocket, send_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness

ALICE = ("alice", "alice-secret")
RULES = """\
{more}
accounts:
- accessKey: alice
  secretKey: {secret}
  topicPerms:
  - T=PUB
"""


def harness(more: str = "", secret: str = "alice-secret") -> RemotingHarness:
    return RemotingHarness(rules=parse_rules(RULES.format(more=more, secret=secret)))


def follow(slave: RemotingHarness, master: RemotingHarness) -> None:
    """Make the one pass on to the other."""
    slave.become(BrokerRole.SLAVE)
    address = f"127.0.0.1:{master.remoting_port}"
    slave.view = GroupView("FOLLOWER", 3, "n1", address, {"n0": "", "n1": address})


def a_master(rules: str) -> RemotingHarness:
    """One with a member at this machine's address."""
    made = RemotingHarness(rules=parse_rules(rules))
    made.member_host = "127.0.0.1"
    return made


def wait_for_members(master: RemotingHarness) -> None:
    """Until their addresses are known."""
    wait_until(lambda: "127.0.0.1" in master.broker.member_hosts.known, "the members' addresses are known")


def passed_on(client: RemotingSocket, key: tuple[str, str] | None, born_host: str) -> bool:
    """Whether the master takes what comes like from a member."""
    texts = {name: str(value) for name, value in send_fields("T").items()}
    fields = texts if key is None else signed(texts, b"x", *key)
    return client.ask(RequestCode.SEND_MESSAGE_V2, {**fields, BORN_HOST: born_host}, b"x").code == 0


@pytest.fixture
def master() -> Iterator[RemotingHarness]:
    with harness() as made:
        yield made


def test_what_a_slave_passes_on_is_checked_by_the_client_s_own_signature(master: RemotingHarness) -> None:
    """The slave's addition is not signed."""
    with harness() as slave, slave.dial(ALICE) as client:
        follow(slave, master)
        assert client.send().code == 0
        assert "needs PUB on topic U" in client.send("U").remark
    assert [decode_record(one.record).topic for one in master.store.log.records] == ["T"]


def test_a_slave_of_a_plain_master_passes_no_signature_on(master: RemotingHarness) -> None:
    """Where the master is, only a name server says, and anybody may register there: he would use the signature."""
    with harness() as slave, slave.dial(ALICE) as client, slave.dial() as unsigned:
        follow(slave, master)
        slave.remoting._forwarding._is_masters_name_checked = False
        refused = client.send()
        assert "does not pass on signed requests" in refused.remark
        assert master.store.log.records == []
        assert "signed" not in unsigned.send().remark


def test_the_master_checks_what_the_slave_let_pass(master: RemotingHarness) -> None:
    """Whose rules may be older."""
    with harness(secret="older-secret") as slave, slave.dial(("alice", "older-secret")) as client:
        follow(slave, master)
        assert "unknown access key" in client.send().remark
    assert not master.store.log.records


def test_a_slave_passes_nothing_on_that_it_refuses(master: RemotingHarness) -> None:
    with harness(secret="newer-secret") as slave, slave.dial(ALICE) as client:
        follow(slave, master)
        assert "unknown access key" in client.send().remark
    assert not master.store.log.records


@pytest.mark.parametrize(
    ("white", "born_host", "taken"),
    [
        ("192.0.2.1", "192.0.2.1:5", False),  # anybody on the member's machine can say so
        ("127.0.0.1", "192.0.2.1:5", False),  # the member is on the list, its client is not
        ("192.0.2.1,127.0.0.1", "192.0.2.1:5", True),
        ("192.0.2.1,127.0.0.1", "192.0.2.9:5", False),
    ],
)
@pytest.mark.parametrize("whose", ["globalWhiteRemoteAddresses", "account"])
def test_a_white_list_must_include_the_client_and_the_member(
    whose: str, white: str, born_host: str, taken: bool
) -> None:
    rules = RULES.format(more="", secret=f"alice-secret\n  whiteRemoteAddress: {white}")
    if whose != "account":
        listed = "".join(f"- {one}\n" for one in white.split(","))
        rules = RULES.format(more=f"{whose}:\n{listed}", secret="alice-secret")
    with a_master(rules) as master, master.dial() as member:
        wait_for_members(master)
        key = ("alice", "not-her-secret") if whose == "account" else None
        assert passed_on(member, key, born_host) is taken


def test_who_pretends_to_be_a_member_has_no_white_list() -> None:
    """Nor a member whose address is not known yet: what it passes on is not its own."""
    rules = RULES.format(more="globalWhiteRemoteAddresses:\n- 127.0.0.1\n- 192.0.2.1\n", secret="alice-secret")
    with RemotingHarness(rules=parse_rules(rules)) as master, master.dial() as client:
        assert client.send().code == 0
        for claimed in ("192.0.2.1:5", "127.0.0.1:5", "", "nonsense"):
            assert not passed_on(client, None, claimed)
            assert passed_on(client, ALICE, claimed)


def test_a_revoked_key_does_not_end_the_connections_of_members() -> None:
    """Others' requests are under way on them."""
    with a_master(RULES.format(more="", secret="alice-secret")) as master, master.dial() as member:
        wait_for_members(master)
        assert passed_on(member, ALICE, "192.0.2.1:5")
        guard = master.guard
        assert guard is not None
        changed = parse_rules(RULES.format(more="", secret="other-secret"))
        master.bridge.post(lambda: guard.apply(changed))
        wait_until(lambda: guard.rules is changed, "the new rules are in force")
        assert not passed_on(member, ALICE, "192.0.2.1:5")
        assert passed_on(member, ("alice", "other-secret"), "192.0.2.1:5")
