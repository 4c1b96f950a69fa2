"""Controls the pipelining client process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.processes import PythonChild

MODULE = "benchmarks.children.load_client"


class CommandRates(NamedTuple):
    """Commands answered per second, and the median of the time that each took."""

    per_second: float
    p50_ms: float


class LoadClient(PythonChild):
    """One client process of a group; see ``children/load_client.py``."""

    def __init__(self, addresses: Sequence[str], group: str, log: Path, *, tls: Path | None = None) -> None:
        """``tls``: the directory with the client's certificate, if the group uses TLS."""
        words = [] if tls is None else ["--tls", str(tls)]
        super().__init__(MODULE, [*words, group, *addresses], log)

    def appends_per_second(self, seconds: float, warmup_seconds: float, body_bytes: int, window: int) -> float:
        """Entries acknowledged per second with ``window`` appends outstanding. Raises if any was not acknowledged."""
        return self._rate("measure", seconds, warmup_seconds, {"body_bytes": body_bytes, "window": window})

    def bulk_appends_per_second(
        self, seconds: float, warmup_seconds: float, body_bytes: int, entries: int, callers: int
    ) -> float:
        """Entries acknowledged per second if each of some threads appends many in a call. Raises if a call fails."""
        options = {"body_bytes": body_bytes, "entries": entries, "callers": callers}
        return self._rate("bulk", seconds, warmup_seconds, options)

    def commands(self, seconds: float, warmup_seconds: float, body_bytes: int, callers: int) -> CommandRates:
        """So many callers, each with one command at a time. Raises if one fails."""
        command = {"do": "commands", "seconds": seconds, "warmup_seconds": warmup_seconds}
        options = {"body_bytes": body_bytes, "callers": callers}
        return CommandRates(**self.ask({**command, **options}, seconds + warmup_seconds + 90.0))

    def megabytes_read_per_second(self, seconds: float) -> float:
        """The rate of large reads of the whole log, which may not be empty."""
        return self._rate("read", seconds, 0.0, {})

    def submit_singles(self, address: str, count: int, body_bytes: int, timeout_seconds: float) -> None:
        """Start ``count`` appends at the node at once, as separate requests; ``hear`` returns their results."""
        command = {"do": "pend", "count": count, "body_bytes": body_bytes, "timeout_seconds": timeout_seconds}
        self.tell({**command, "address": address})

    def _rate(self, what: str, seconds: float, warmup_seconds: float, options: Mapping[str, int]) -> float:
        command = {"do": what, "seconds": seconds, "warmup_seconds": warmup_seconds, **options}
        return float(self.ask(command, seconds + warmup_seconds + 90.0)["per_second"])
