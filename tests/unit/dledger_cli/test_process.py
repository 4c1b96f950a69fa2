"""A server's log: what is for people is there, what gRPC says of lost clients is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from grpc._cython import cygrpc

from dledger_cli import process

LOGGER = logging.getLogger("grpc._cython.cygrpc")


@pytest.fixture(autouse=True)
def _filters_as_before() -> Iterator[None]:
    before = LOGGER.filters[:]
    yield
    LOGGER.filters[:] = before


def test_a_client_that_went_away_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """A broker that was paused comes back to hundreds of them; other errors of gRPC are still told."""
    process.to_stderr("info")

    for error in (cygrpc.ExecuteBatchError("nobody takes the answer"), RuntimeError("a handler is broken")):
        LOGGER.error("raised in core", exc_info=error)

    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]
