"""Who gets a signature of RocketMQ's kind, which says neither what is asked, nor whom, nor when."""

from __future__ import annotations

import ast
from pathlib import Path

import rocketstore

ROOT = Path(rocketstore.__file__).parent.parent


def test_only_clients_sign_in_this_way() -> None:
    """They ask how an address is known: anybody may register at a name server."""
    signers = set()
    for package in ("rocketstore", "cluster", "dledger", "dledger_spark"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == "dledger.remoting.frame":
                    names = {one.name for one in node.names}
                    signers |= {path.relative_to(ROOT).as_posix()} if names & {"signed", "signature"} else set()

    assert signers == {"dledger/client/aio/connections.py", "rocketstore/client/aio/connections.py"}
