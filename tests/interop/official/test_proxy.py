"""RocketMQ 5.5's proxy in front of a broker of ours: its clients are served through it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocketstore.client import Admin, GroupInfo, TopicInfo
from rocketstore.server import BrokerServer
from tests.interop import rocketmq5
from tests.interop.official.clients import LANGUAGES, ClientError, running
from tests.interop.official.test_security import broker
from tests.interop.official.world import bodies
from tests.interop.rocketmq import broker_port
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in
from tests.unit.rocketstore.nameserver.wire import running as name_server_running

pytestmark = pytest.mark.interop

START_S = 120


def _lag(server: BrokerServer, group: str) -> int:
    with Admin([f"127.0.0.1:{server.port}"]) as admin:
        return admin.lag(group, "Proxied")


def test_messages_pass_through_the_proxy(tmp_path: Path) -> None:
    """Sent, received, acknowledged, and pushed; the broker knows what is left."""
    language = LANGUAGES["java"]
    language.install()
    with name_server_running(config_in(tmp_path)) as names:
        settings = {"listenPort": str(broker_port()), "brokerName": "ours", "namesrvAddr": names.address}
        with (
            broker(tmp_path, settings) as server,
            rocketmq5.proxy(tmp_path / "proxy", names.address) as address,
            running(language, tmp_path / "home") as client,
        ):
            with Admin([f"127.0.0.1:{server.port}"]) as admin:
                admin.put_topic(TopicInfo("Proxied", 3, 3, message_type="NORMAL"))
                for group in ("simple", "push"):
                    admin.put_group(GroupInfo(group))
                    admin.reset_offsets(group, "Proxied", "first")

            def has_started() -> bool:
                try:
                    client.ask("producer", name="p", endpoints=address, topics=["Proxied"])
                except ClientError:
                    return False
                return True

            wait_until(has_started, "the proxy serves its clients", START_S)
            for number in range(5):
                client.ask("send", client="p", topic="Proxied", body=str(number), tag="t")
            given = {"endpoints": address, "subscriptions": {"Proxied": "t"}}
            client.ask("simple", name="c", group="simple", **given)
            got: list[str] = []

            def has_all() -> bool:
                for one in client.ask("receive", client="c")["messages"]:
                    client.ask("ack", client="c", message=one["n"])
                    got.append(one["body"])
                return len(got) >= 5

            wait_until(has_all, "all are received", START_S)
            assert sorted(got) == list("01234")
            assert _lag(server, "simple") == 0
            client.ask("push", name="pushed", group="push", **given)
            told = client.wait_for("message", "pushed", lambda found: len(found) >= 5)
            assert sorted(bodies(told)) == list("01234")
            wait_until(lambda: _lag(server, "push") == 0, "all are acknowledged", START_S)
