"""The three members of a group of the Java line are taken over together, from their own directories."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from dledger.config import Member, ServerConfig, StoreConfig
from dledger.server import DLedgerServer
from dledger.types import LogIndex, NodeId, Role, Standing
from dledger_cli.local.group import free_ports
from tests.interop.goldens import LEDGER, open_golden
from tests.interop.stores import SEGMENT_BYTES
from tests.support.waiting import wait_until

_INDEX_BYTES = 32 * 64


def _member(root: Path, number: int, members: tuple[Member, ...]) -> DLedgerServer:
    store = StoreConfig(root, segment_bytes=SEGMENT_BYTES, index_segment_bytes=_INDEX_BYTES, import_unchecked=True)
    return DLedgerServer(
        ServerConfig(node_id=NodeId(f"n{number}"), members=members, group="interop", client_port=0, store=store)
    )


def test_three_imported_members_elect_the_longest_and_serve_all_that_java_wrote(tmp_path: Path) -> None:
    """None of them knows whom it voted for; together they elect the one whose log is the longest, and count again."""
    root, lines = open_golden(LEDGER, tmp_path)
    entries = [json.loads(line) for line in lines]
    for other in ("n1", "n2"):
        shutil.copytree(root / "dledger-n0", root / f"dledger-{other}")
    for lagging in ("n0", "n1"):  # their last segment had not come yet
        max((root / f"dledger-{lagging}" / "data").iterdir()).unlink()
        (root / f"dledger-{lagging}" / "checkpoint").unlink(missing_ok=True)
    members = tuple(Member(NodeId(f"n{i}"), "127.0.0.1", port) for i, port in enumerate(free_ports(3)))
    nodes = [_member(root, number, members) for number in range(3)]
    try:
        assert [node.log.hard_state.load().standing for node in nodes] == [Standing.DOUBTFUL] * 3
        assert nodes[0].log.last.index < nodes[2].log.last.index == entries[-1]["index"]
        for node in nodes:
            node.start()

        wait_until(lambda: any(node.status().role is Role.LEADER for node in nodes), "a leader", 30)
        assert nodes[2].status().role is Role.LEADER
        wait_until(lambda: all(node.log.committed_index >= entries[-1]["index"] for node in nodes), "all have all", 30)
        wait_until(lambda: all(node.status().voter for node in nodes), "all count", 30)

        expected = [(one["index"], one["term"], one["magic"], one["pos"]) for one in entries]
        for node in nodes:
            found = node.read(LogIndex(0), LogIndex(entries[-1]["index"]), 1 << 24)
            assert [(one.index, one.term, int(one.magic), int(one.position)) for one in found] == expected
        assert [node.fatal for node in nodes] == [None] * 3
    finally:
        for node in nodes:
            node.stop(graceful=False)
