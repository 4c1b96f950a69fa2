"""``docs/migrating.md``: every command in it is carried out, from a group of three to a plain broker."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from dledger.types import NodeId
from dledger_cli.cli import main
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.message.message import Message
from tests.docs.documents import ROOT, lines
from tests.support.waiting import wait_until

pytestmark = pytest.mark.lane("processes")  # real ones, which want a small machine for themselves

MIGRATING: Final = ROOT / "docs" / "migrating.md"
SMALL: Final = {"mappedFileSizeCommitLog": "1m", "mappedFileSizeConsumeQueue": "6000", "maxIndexNum": "2000"}
COUNT: Final = 30


def _commands() -> list[str]:
    """Those in the document's blocks, in order."""
    return [line.text for line in lines(MIGRATING) if line.fence is not None]


def _run(command: str, places: dict[str, str]) -> str:
    """What a command of the document prints, with the document's places replaced by ours."""
    words = [places.get(word, word) for word in shlex.split(command)]
    result = CliRunner().invoke(main, words[1:])
    assert result.exit_code == 0, f"{command}: {result.output}"
    return result.output


@pytest.mark.slow
def test_every_command_of_the_document_is_run(tmp_path: Path) -> None:
    """A group's member is exported, its export looked at, and served by a plain broker."""
    check, start_here, verify, export, start_plain = _commands()
    assert start_here == "dledger broker -c broker.conf"
    with LocalBrokers(tmp_path / "group", settings=SMALL) as group:
        group.master()
        with Admin(group.addresses, timeout_s=30) as admin, Producer(group.addresses, timeout_s=30) as producer:
            admin.put_topic(TopicInfo("T", 2, 2, 6))
            for number in range(COUNT):
                producer.send(Message("T", b"%d" % number))
        group.wait_converged()  # every member knows that all is committed
        nodes = list(group.nodes)
        for node in nodes:
            group.stop(node)
    one = LocalBrokers(tmp_path / "plain", size=1, plain=True, settings=SMALL)
    plain = one.root_dir(NodeId("n0"))
    conf = one.conf_file(NodeId("n0"))
    assert ["broker", "-c", str(conf)] == one.command(NodeId("n0"))[3:6]  # which writes the file
    places = {f"/data/{node}/dledger-{node}": str(group.store_dir(node)) for node in nodes}
    places |= {f"/data/{node}": str(group.root_dir(node)) for node in nodes}
    places |= {"/data/plain": str(plain), "broker-n0.conf": str(group.conf_file(NodeId("n0")))}
    places |= {"DIR": str(plain), "broker.conf": str(conf), "plain.conf": str(conf)}

    assert "no problems found" in _run(verify, places)
    assert f"{COUNT:,} messages" in _run(export, places)
    assert "T" in _run(check, places)

    assert start_plain == "dledger broker -c plain.conf"  # as LocalBrokers does
    found: list[int] = []
    with one, one.consumer("g", "T") as consumer:

        def has_all() -> bool:
            found.extend(int(each.body) for each in consumer.poll())
            return len(found) >= COUNT

        wait_until(has_all, "every message is there")
    assert sorted(found) == list(range(COUNT))
