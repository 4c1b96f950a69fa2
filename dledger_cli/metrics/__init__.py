"""Prometheus metrics of a server: the endpoint, its contents, and the measurements in the hot paths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dledger_cli.metrics.exporter import Exporter


@contextmanager
def metered(host: str, port: int) -> Iterator[Exporter | None]:
    """Serve metrics of a server process at ``host:port``; None if ``port`` is 0. Raises ``ConfigError``.

    In that case nothing else of this package is imported, and nothing is measured.
    """
    if port == 0:
        yield None
        return
    from dledger_cli.metrics.exporter import Exporter

    with Exporter(host, port) as exporter:
        yield exporter
