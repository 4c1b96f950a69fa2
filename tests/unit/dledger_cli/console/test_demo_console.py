"""The console that stays with a kept demo: it listens where it says, and ends when it is told to."""

from __future__ import annotations

import os
import socket
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dledger_cli.console.server import DetachedConsole
from dledger_cli.local.group import LocalGroupError, free_ports

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Nobody:
    """A group of which nothing runs: the console starts all the same."""

    directory: Path
    addresses: tuple[str, ...]
    name: str = "default"

    def environment(self) -> dict[str, str]:
        """As every process's."""
        return dict(os.environ)


def test_it_listens_at_another_port_if_the_usual_one_is_taken(tmp_path: Path) -> None:
    """The address it gives is the one that answers, until it is closed."""
    group = Nobody(tmp_path, tuple(f"127.0.0.1:{port}" for port in free_ports(1)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        console = DetachedConsole(group, port=port)  # type: ignore[arg-type]  # a stand-in with the same attributes
        try:
            with urllib.request.urlopen(console.url, timeout=DEADLINE_S) as page:
                assert page.status == 200
            assert urlsplit(console.url).port not in (port, None)
        finally:
            console.close()

    with pytest.raises(ProcessLookupError):
        os.kill(console.pid, 0)


def test_why_it_does_not_start_is_told(tmp_path: Path) -> None:
    """The end of what it printed."""
    group = Nobody(tmp_path, ("not an address",))

    with pytest.raises(LocalGroupError, match="not an address"):
        DetachedConsole(group)  # type: ignore[arg-type]  # a stand-in with the same attributes
