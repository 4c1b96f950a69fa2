"""Brokers that join and leave a group: what name servers and clients learn of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.drill.processes import MemberBrokers
from dledger.types import NodeId
from rocketstore.client import Admin, BrokerUnreachableError, Message, NotFoundError, Producer
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

TIMEOUT_S = 60.0
TOPIC = "orders"


class RegisteredBrokers(MemberBrokers):
    """They tell a name server of themselves."""

    name_server = ""

    def conf_lines(self, node: NodeId) -> dict[str, str]:
        return {**super().conf_lines(node), "namesrvAddr": self.name_server}

    def member(self, *words: str) -> None:
        """As an operator does it."""
        addresses = ",".join(self.nodes[node].client_address for node in self.members)
        command = [sys.executable, "-m", "dledger_cli.entry", "member", *words, "-b", addresses, "-g", self.name]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr

    def place(self, node: NodeId) -> str:
        return f"{node}=127.0.0.1:{self.nodes[node].peer_port}"


@pytest.mark.slow
def test_a_new_broker_registers_and_a_removed_one_leaves_while_the_ids_of_others_stay(tmp_path: Path) -> None:
    """Who waits to be added is not shown to clients; who was removed says so, and leads to the others."""
    with running(config_in(tmp_path / "namesrv")) as server:
        group = RegisteredBrokers(tmp_path / "brokers", size=3, spares=1)
        group.name_server = server.address
        new = next(node for node in group.nodes if node not in group.members)

        def ids() -> dict[str, int]:
            """Broker ids of the slaves, by address."""
            with Admin(name_servers=server.address) as admin:
                try:
                    (found,) = admin.brokers()
                except (BrokerUnreachableError, NotFoundError, ValueError):
                    return {}
            return {address: number for number, address in found.addresses.items() if number}

        def expected(*nodes: NodeId) -> dict[str, int]:
            """The number of n2 is 2, so its id is 3, and so on."""
            master = group.master()
            return {group.nodes[one].client_address: int(one[1:]) + 1 for one in nodes if one != master}

        def wait_for(*nodes: NodeId) -> None:
            wait_until(lambda: ids() == expected(*nodes), f"{nodes} are registered: {ids()}", TIMEOUT_S)

        try:
            group.start_together(group.members)
            wait_for(*group.members)
            with Producer(name_servers=server.address) as producer:
                producer.send(Message(TOPIC, b"before"))
                group.start(new)
                wait_for(*group.members)
                group.member("add", group.place(new))
                group.members.append(new)
                wait_for(*group.members)
                producer.send(Message(TOPIC, b"between"))

                gone = next(node for node in group.members if node not in (group.master(), new))
                group.member("remove", gone)
                group.members.remove(gone)
                wait_for(*group.members)
                producer.send(Message(TOPIC, b"after"))
            place = group.nodes[gone].client_address
            with Admin([place]) as admin:
                wait_until(lambda: "removed" in admin.status(place).runtime.conditions, "it says so itself", TIMEOUT_S)
            with Producer([place]) as producer:  # it still leads clients to the others
                producer.send(Message(TOPIC, b"by way of it"))
        finally:
            group.close()
