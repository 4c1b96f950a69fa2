"""RocketMQ's clients and mqadmin with a broker of ours that has access rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from dledger.config import AccessConfig
from rocketstore.server import BrokerServer
from tests.interop import java, rocketmq
from tests.unit.rocketstore.nameserver.wire import config_in, running
from tests.unit.rocketstore.test_server import plain

pytestmark = pytest.mark.interop

TOPIC, MESSAGES = "AccessTopic", 20
RULES: Final = """\
accounts:
- accessKey: root
  secretKey: root-secret
  admin: true
- accessKey: alice
  secretKey: alice-secret
  topicPerms:
  - AccessTopic=PUB|SUB
  groupPerms:
  - interop-consumers=SUB
- accessKey: mallory
  secretKey: mallory-secret
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, BrokerServer]]:
    """A name server's address, and a broker that has registered there."""
    java.build()
    file = tmp_path / "plain_acl.yml"
    file.write_text(RULES)
    file.chmod(0o600)
    with running(config_in(tmp_path)) as names:
        port = rocketmq.broker_port()
        config = plain(tmp_path / "broker", listenPort=str(port), namesrvAddr=names.address, brokerName="guarded")
        access = AccessConfig(acl_enable=True, acl_file=file)
        server = BrokerServer(replace(config, access=access)).start()
        try:
            yield names.address, server
        finally:
            server.stop()


def test_those_who_may_send_consume_and_administrate(tmp_path: Path, served: tuple[str, BrokerServer]) -> None:
    """And nobody else."""
    names, server = served
    tools, directory = tmp_path / "tools", tmp_path / "client"
    update = ("updateTopic", "-n", names, "-b", f"127.0.0.1:{server.port}", "-t", TOPIC, "-r", "4", "-w", "4")
    rocketmq.sign_as(tools, "alice", "alice-secret")
    assert "requires an account with admin: true" in rocketmq.failed_admin(tools, *update)
    assert server.state.topic(TOPIC) is None
    rocketmq.sign_as(tools, "root", "root-secret")
    assert "success" in rocketmq.admin(tools, *update)
    printed = rocketmq.client(directory, "produce", names, TOPIC, str(MESSAGES), key=("alice", "alice-secret"))
    assert printed == ["SEND_OK guarded"] * MESSAGES
    for key, reason in (
        (("mallory", "mallory-secret"), "needs PUB on topic AccessTopic"),
        (("alice", "another-secret"), "unknown access key"),
        (None, "requires an access key"),
    ):
        with pytest.raises(AssertionError, match=f"AclException: .*{reason}"):
            rocketmq.client(directory, "produce", names, TOPIC, "1", key=key)
    consumed = rocketmq.client(directory, "consume", names, TOPIC, str(MESSAGES), key=("alice", "alice-secret"))
    assert sorted(map(int, consumed)) == list(range(MESSAGES))
    progress = rocketmq.admin(tools, "consumerProgress", "-n", names, "-g", "interop-consumers")
    assert TOPIC in progress
    stored = sum(server.store.max_offset(TOPIC, queue) for queue in range(4))
    assert stored == MESSAGES
