"""A slave becomes master: how brokers stand, the command with its checks, and the old master that comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger.monitoring import ConditionKind
from dledger.remoting.codes import AnswerCode
from dledger_cli.cli import main
from rocketstore.broker_remoting import registration
from rocketstore.broker_remoting.registration import NameServerRegistration, SuccessorWatch
from rocketstore.nameserver.server import NameServer
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from rocketstore.types import BrokerRole
from tests.support.runtime_broker import runtime_broker
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.test_master_and_slave import broker, has_all, port_for_slaves
from tests.unit.rocketstore.nameserver.wire import calling, config_in
from tests.unit.rocketstore.nameserver.wire import running as name_server_running
from tests.unit.rocketstore.test_server import pull, send


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[ExitStack]:
    assert tmp_path.is_dir()
    with ExitStack() as one:
        yield one


def run(*arguments: str) -> Result:
    """A command's outcome."""
    return CliRunner().invoke(main, list(arguments))


class Pair:
    """A master and a slave, known to a name server."""

    def __init__(self, stack: ExitStack, tmp_path: Path) -> None:
        self.directory = tmp_path
        self.names: NameServer = stack.enter_context(name_server_running(config_in(tmp_path)))
        self.known = {"namesrvAddr": self.names.address, "registerNameServerPeriod": "10000"}
        self.ports = {name: port_for_slaves() for name in ("m", "mh", "s", "sh")}
        self.stack = stack
        self.master = self.start("m", brokerRole="SYNC_MASTER")
        self.slave = self.start("s", brokerRole="SLAVE", brokerId="1")
        replication = self.master.replication
        assert replication is not None
        wait_until(lambda: len(replication.slaves()) == 1, "the slave follows")

    def settings(self, name: str, **more: str) -> dict[str, str]:
        """Of the broker in this directory."""
        return self.known | {"listenPort": self.ports[name], "haListenPort": self.ports[f"{name}h"]} | more

    def start(self, name: str, **settings: str) -> BrokerServer:
        """A broker until the end, or until it is stopped."""
        return self.stack.enter_context(broker(self.directory / name, **self.settings(name, **settings)))

    def promote(self, *options: str) -> Result:
        """The command, for the slave."""
        given = self.settings("s", brokerRole="SLAVE", brokerId="1")
        flags = [one for name, value in given.items() for one in ("--set", f"{name}={value}")]
        return run("ha", "promote", "-s", str(self.directory / "s"), *flags, *options)

    def master_is_gone(self) -> None:
        """It has stopped, and the slave has noticed."""
        self.master.stop()
        replication = self.slave.replication
        assert replication is not None
        wait_until(lambda: not replication.facts().is_connected, "the slave has noticed")


def test_both_sides_say_how_they_stand(stack: ExitStack, tmp_path: Path) -> None:
    """In a table and as JSON; the exit code says whether all is well."""
    pair = Pair(stack, tmp_path)
    send(pair.master, b"one")
    has_all(pair.slave, pair.master)
    ask = ("ha", "status", "--namesrv", pair.names.address)
    wait_until(lambda: run(*ask).exit_code == 0, "both are registered, and the slave has everything")
    shown = run(*ask).output
    assert "2 of 2 copies" in shown
    assert "in sync" in shown
    assert "follows 127.0.0.1:" in shown
    assert "follows" in run("cluster", "list", "--namesrv", pair.names.address).output
    assert "follows" in run("cluster", "list", "-b", pair.slave.address).output
    found = {one["broker_id"]: one["ha"] for one in json.loads(run(*ask, "--json").output)["brokers"]}
    assert found[0]["followers"][0]["lag_bytes"] == found[1]["lag_bytes"] == 0
    assert found[0]["end"] == found[1]["end"] > 0
    assert found[0]["epoch"] == found[1]["epoch"] == 1

    pair.master_is_gone()
    alone = run("ha", "status", "-b", f"127.0.0.1:{pair.ports['s']}")
    assert alone.exit_code == 1
    assert "does not follow" in alone.output


def test_a_slave_succeeds_its_master_also_without_a_port_for_slaves(tmp_path: Path) -> None:
    """The epoch rises, so that the old master knows; a broker that never had one gets none."""
    port = port_for_slaves()
    with broker(tmp_path / "m", haListenPort=port) as master:
        send(master, b"one")
        settings = {"brokerRole": "SLAVE", "brokerId": "1", "haMasterAddress": f"127.0.0.1:{port}"}
        with broker(tmp_path / "s", **settings) as slave:
            has_all(slave, master)
    with broker(tmp_path / "s") as successor:
        replication = successor.replication
        assert replication is not None
        assert replication.epoch == 2
    with broker(tmp_path / "p"):
        assert not (tmp_path / "p" / "config" / "haEpoch.json").exists()


def test_a_living_master_is_not_replaced(stack: ExitStack, tmp_path: Path) -> None:
    """Not without naming what is lost; and nothing is written meanwhile."""
    pair = Pair(stack, tmp_path)
    refused = pair.promote("--yes")
    assert refused.exit_code == 1
    assert "--force two-masters" in refused.output
    assert not (tmp_path / "s" / "config" / "haRole.json").exists()
    wrong = pair.promote("--yes", "--force", "missing-bytes")
    assert wrong.exit_code == 1
    assert not (tmp_path / "s" / "config" / "haRole.json").exists()


def test_the_slave_of_a_dead_master_is_promoted(stack: ExitStack, tmp_path: Path) -> None:
    """It goes on where the log ends, as master of the next epoch; the old one takes nothing when it comes back."""
    pair = Pair(stack, tmp_path)
    send(pair.master, b"one")
    has_all(pair.slave, pair.master)
    pair.master_is_gone()
    end = pair.slave.store.log.end_offset
    assert pair.slave.replication is not None
    assert not pair.slave.replication.facts().is_promoted
    asked = pair.promote()  # nobody confirms
    assert asked.exit_code == 1
    assert not (tmp_path / "s" / "config" / "haRole.json").exists()
    done = pair.promote("--yes")
    assert done.exit_code == 0, done.output
    assert "epoch 2" in done.output
    assert "promoted at" in pair.promote("--yes").output
    replication = pair.slave.replication
    assert replication is not None
    assert replication.facts().is_promoted  # a slave promoted next would see it

    pair.slave.stop()
    promoted = pair.start("s", brokerRole="SLAVE", brokerId="1")
    assert str(promoted.store.role) == "ASYNC_MASTER"
    assert [one.code for one in send(promoted, b"two")] == [AnswerCode.SUCCESS]
    wait_until(lambda: len(pull(promoted)) == 2, "both can be pulled")
    wait_until(lambda: promoted.is_ready, "it is registered")
    registered = ("cluster", "list", "--namesrv", pair.names.address)
    wait_until(lambda: f"0   127.0.0.1:{pair.ports['s']}" in run(*registered).output, "as master")

    old = pair.start("m", brokerRole="ASYNC_MASTER")
    refusal = old.store.refusal
    assert refusal is not None
    assert "epoch 2, here 1" in refusal.reason
    assert old.conditions.holds(ConditionKind.SUPERSEDED)
    assert old.store.log.end_offset == end  # it writes nothing of its own, either
    assert [one.code for one in send(old, b"lost")] == [AnswerCode.SERVICE_NOT_AVAILABLE]
    assert f"0   127.0.0.1:{pair.ports['s']}" in run(*registered).output
    old.stop()
    old_slave = pair.start("m", brokerRole="SLAVE", brokerId="1")
    has_all(old_slave, promoted)
    assert len(pull(old_slave)) == 2

    undone = pair.promote("--undo")  # too late to be without a word
    assert undone.exit_code == 0
    assert "runs as master (epoch 2" in undone.output
    assert not (tmp_path / "s" / "config" / "haRole.json").exists()


def test_a_master_looks_for_a_successor_before_it_takes_anything(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it write anything of its own before, such as its state: that would be in no other log."""
    name_server = stack.enter_context(name_server_running(config_in(tmp_path)))
    seen: list[str] = []

    async def look(watch: SuccessorWatch) -> None:
        refusal = one.store.refusal
        seen.append("" if refusal is None else refusal.reason)
        watch._master.superseded("another")

    monkeypatch.setattr(SuccessorWatch, "look", look)
    given = {"storePathRootDir": str(tmp_path / "m"), "listenPort": "0", "namesrvAddr": name_server.address}
    one = BrokerServer(load_broker_settings(None, {}, given | {"vipPort": "0", "haListenPort": "0"})[0])
    stack.callback(one.stop)
    one.start()
    assert seen == ["the store is not running"]
    refusal = one.store.refusal
    assert refusal is not None
    assert refusal.reason.endswith("another")


def test_a_slave_knows_after_a_restart_what_its_master_had(stack: ExitStack, tmp_path: Path) -> None:
    """The day after, when the master's disk is gone: what is lost is known, or that it is not."""
    pair = Pair(stack, tmp_path)
    send(pair.master, b"one")
    has_all(pair.slave, pair.master)
    end = pair.master.store.log.max_offset
    pair.master_is_gone()
    pair.slave.stop()
    again = pair.start("s", brokerRole="SLAVE", brokerId="1")
    assert again.replication is not None
    facts = again.replication.facts()
    assert (facts.master_end, facts.lag_bytes) == (end, 0)
    assert facts.contact_ms >= 0
    assert pair.promote("--yes").exit_code == 0
    undone = pair.promote("--undo")
    assert undone.exit_code == 0
    assert "runs as master" not in undone.output
    given = pair.settings("s", brokerRole="SLAVE", brokerId="1", storePathRootDir=str(tmp_path / "s"))
    assert load_broker_settings(None, {}, given)[0].store.broker_role is BrokerRole.SLAVE


def test_a_slave_that_is_stopped_is_asked_to_be_started(stack: ExitStack, tmp_path: Path) -> None:
    """Only it can say what it has."""
    pair = Pair(stack, tmp_path)
    pair.master_is_gone()
    pair.slave.stop()
    refused = pair.promote("--yes", "--force", "unasked")
    assert refused.exit_code == 1
    assert "start it" in refused.output


def test_only_a_slave_is_promoted(tmp_path: Path) -> None:
    """Settings of a master are a mistake."""
    refused = run("ha", "promote", "-s", str(tmp_path), "--yes")
    assert refused.exit_code == 2
    assert "not the settings of a slave" in refused.output


def test_a_stranger_that_stays_is_told_of_once(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is looked at again and again; the condition stays, and the log has one line."""
    monkeypatch.setattr(registration, "INTERVAL_S", 0.02)
    name_server = stack.enter_context(name_server_running(config_in(tmp_path)))
    says = {"haRole": "master", "haEpoch": "99", "haBeginOffset": "9999", "haEndOffset": "9999", "haProof": "0" * 64}
    stranger = stack.enter_context(runtime_broker(says))
    caller = stack.enter_context(calling(name_server))
    master = stack.enter_context(broker(tmp_path / "m"))
    send(master, b"one", b"two")
    master.stop()
    caller.register(0, stranger.address, name=master.config.name)
    # It must not register itself meanwhile, or the name server knows two of them.
    monkeypatch.setattr(NameServerRegistration, "start", lambda _self: None)
    with broker(tmp_path / "m", namesrvAddr=name_server.address) as again:
        seen = stranger.asked
        wait_until(lambda: stranger.asked > seen + 6, "it is asked again, two questions a time")
        assert again.conditions.holds(ConditionKind.SUPERSEDED)
    told = [one.getMessage() for one in caplog.records if one.name == "rocketstore"]
    assert len([one for one in told if "does not prove that it has this broker's log" in one]) == 1


def test_a_stranger_under_a_masters_name_ends_it_not(stack: ExitStack, tmp_path: Path) -> None:
    """Whatever epoch it claims: it lacks the log. The master says so, and takes messages, also after a restart."""
    name_server = stack.enter_context(name_server_running(config_in(tmp_path)))
    says = {"haRole": "master", "haEpoch": "99", "haBeginOffset": "9999", "haEndOffset": "9999", "haProof": "0" * 64}
    stranger = stack.enter_context(runtime_broker(says))
    caller = stack.enter_context(calling(name_server))
    master = stack.enter_context(broker(tmp_path / "m"))
    send(master, b"one", b"two")
    master.stop()
    caller.register(0, stranger.address, name=master.config.name)
    with broker(tmp_path / "m", namesrvAddr=name_server.address) as again:
        assert stranger.fields  # it was asked for the proof
        assert again.conditions.holds(ConditionKind.SUPERSEDED)
        assert again.store.refusal is None
        assert [one.code for one in send(again, b"three")] == [AnswerCode.SUCCESS]
