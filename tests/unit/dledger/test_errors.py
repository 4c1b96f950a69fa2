"""Errors as values: what is left of them in another process."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from dledger.errors import ConfigError, CorruptLogError, DLedgerError, LeaderHint, NotLeaderError
from dledger.types import NodeId
from rocketstore.client import ClientError, NotFoundError, PartlySentError


@pytest.mark.parametrize(
    "error",
    [
        ConfigError(["port=70000", "no address"]),
        CorruptLogError(Path("log"), 48, "wrong CRC", "restore it"),
        NotLeaderError("ask n1", leader=LeaderHint(NodeId("n1"), "127.0.0.1:1")),
        NotFoundError("no topic", answer_code=17, address="127.0.0.1:1"),
        PartlySentError("one of two", [ClientError("gone", outcome="unknown")]),
    ],
)
def test_an_error_is_the_same_in_the_process_that_it_is_sent_to(error: DLedgerError) -> None:
    """Worker processes (multiprocessing, Celery) return exceptions pickled; one that cannot be breaks the pool."""
    received = pickle.loads(pickle.dumps(error))

    assert (type(received), str(received), received.outcome) == (type(error), str(error), error.outcome)
    assert {name: repr(value) for name, value in vars(received).items()} == {
        name: repr(value) for name, value in vars(error).items()
    }
