"""A server's log: lines for people or one JSON object per line, with the facts of every event as fields."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dledger.access.audit import AuditEvent, AuditLog
from dledger.core.messages import RoleChange, RoleReason
from dledger.log_output import speaks_for
from dledger.runtime.events import NodeLines
from dledger.store.opening import RecoveryReport
from dledger.types import NodeId, Role, Term
from dledger_cli import process

N0 = NodeId("n0")
Begin = Callable[[str, str], io.StringIO]


@pytest.fixture
def log() -> Iterator[Begin]:
    """Sets the log up as a server does (pytest's own handlers are put aside) and gives what is written to it."""
    root, grpc = logging.getLogger(), logging.getLogger(process._GRPC_LOGGER)
    handlers, level, filters = root.handlers[:], root.level, grpc.filters[:]

    def begin(log_level: str, form: str) -> io.StringIO:
        root.handlers = []
        process.to_stderr(log_level, form)
        (handler,) = root.handlers
        assert isinstance(handler, logging.StreamHandler)
        stream = io.StringIO()
        handler.setStream(stream)
        return stream

    yield begin
    root.handlers, grpc.filters = handlers, filters
    root.setLevel(level)


def objects(stream: io.StringIO) -> list[dict[str, Any]]:
    """One object per line."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_role_change_is_one_line_with_role_term_leader_and_reason(log: Begin) -> None:
    """What an operator looks for after an election, and which node and group say so."""
    stream = log("info", "json")
    process.name_speaker(node="n0", group="orders")

    NodeLines(N0).role_changed(RoleChange(Role.FOLLOWER, Term(3), None, RoleReason.QUORUM_LOST))

    (line,) = objects(stream)
    facts = {name: line[name] for name in ("event", "node", "group", "role", "term", "leader", "reason", "level")}
    assert facts == {
        "event": "role_change",
        "node": "n0",
        "group": "orders",
        "role": "FOLLOWER",
        "term": 3,
        "leader": "unknown",
        "reason": "quorum_lost",
        "level": "info",
    }
    assert line["message"] == "n0 is FOLLOWER in term 3, leader unknown: quorum_lost"
    assert line["time"].endswith("Z")


def test_a_recovery_is_one_line_with_all_that_was_found(log: Begin) -> None:
    """Paths and absent values are JSON, too."""
    stream = log("info", "json")

    NodeLines(N0).recovered(RecoveryReport(True, 41, 0, 42, removed=(Path("/data/old"),), duration_ms=7))

    (line,) = objects(stream)
    assert (line["event"], line["clean_stop"], line["last_index"], line["cut_at"]) == ("recovery", True, 41, None)
    assert line["removed"] == ["/data/old"]


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (RecoveryReport(False, -1, 0, 0, duration_ms=3), "recovered in 3 ms: the log is empty"),
        (
            RecoveryReport(True, 41, 30, 12, duration_ms=7),
            "recovered in 7 ms after a clean stop: the last entry is 41; verified 12 from 30",
        ),
        (
            RecoveryReport(False, 41, 0, 0, 99, "bad CRC", 40, (Path("/a"), Path("/b")), 7, "its disk was copied"),
            "recovered in 7 ms after no clean stop: the last entry is 41; cut at position 99 (bad CRC); index "
            "rewritten from 40; removed /a, /b; in doubt: its disk was copied",
        ),
    ],
)
def test_a_recovery_is_a_sentence(log: Begin, report: RecoveryReport, told: str) -> None:
    """Whoever reads a log need not read Python."""
    stream = log("info", "text")

    NodeLines(N0).recovered(report)

    assert stream.getvalue().rstrip().endswith(f"n0: {told}")


def test_who_was_refused_what_is_a_line_of_fields(log: Begin) -> None:
    """An audit line is searched by its fields; repeats are told with their number."""
    stream = log("info", "json")
    audit = AuditLog()
    refused = AuditEvent("eve?", "10.0.0.9:4711", "Append", "orders", 'says "no" \n')

    audit.denied(refused)
    audit.denied(refused)
    audit.flush()
    audit.allowed(AuditEvent("root", "10.0.0.1:1", "PutTopic", "orders"))

    names = ("event", "result", "caller", "from", "action", "resource", "reason", "repeated")
    assert [{name: line.get(name) for name in names} for line in objects(stream)] == [
        dict(
            zip(
                names,
                ("audit", "denied", "eve?", "10.0.0.9:4711", "Append", "orders", 'says "no" \n', None),
                strict=True,
            )
        ),
        dict(zip(names, ("audit", "denied", "eve?", "10.0.0.9", "Append", "orders", 'says "no" \n', 1), strict=True)),
        dict(zip(names, ("audit", "allowed", "root", "10.0.0.1:1", "PutTopic", "orders", "", None), strict=True)),
    ]


def test_an_error_carries_its_trace_in_one_line(log: Begin) -> None:
    """A stack trace must not fall apart into lines that no collector puts together again."""
    stream = log("info", "json")
    error = RuntimeError("it broke")

    logging.getLogger("x").error("a thread\nfailed", exc_info=error)

    (line,) = objects(stream)
    assert (line["message"], line["error"]) == ("a thread\nfailed", "RuntimeError('it broke')")
    assert "RuntimeError: it broke" in line["stack"]


def test_people_get_lines(log: Begin) -> None:
    """The default; what goes to standard output is as it was."""
    stream = log("info", "text")
    process.name_speaker(node="n0")

    logging.getLogger("x").info("hello", extra={"event": "greeting"})
    logging.getLogger("x").debug("not told")

    assert stream.getvalue().endswith(" x hello\n")
    assert len(stream.getvalue().splitlines()) == 1
    assert process.announcement("it is ready: now", "started") == "it is ready: now"


def test_lines_for_people_name_their_group_in_a_process_of_several(log: Begin) -> None:
    """Once; a line about the process as a whole names none, nor does any where there is one group."""
    stream = log("info", "text")
    told = logging.getLogger("x").info

    with speaks_for("orders"):
        process.name_speaker(node="n0")
        told("saved")
        told("orders/n0: saved")
        process.name_speaker(node="n0", group="orders")
        told("saved")
    process.name_speaker(node="n0")
    told("saved")

    messages = [line.partition(" x ")[2] for line in stream.getvalue().splitlines()]
    assert messages == ["orders: saved", "orders/n0: saved", "saved", "saved"]


def test_what_is_announced_follows_the_format(log: Begin) -> None:
    """Whoever collects standard output, too, gets JSON only."""
    log("error", "json")
    process.name_speaker(node="n0", group="orders")

    line = json.loads(process.announcement("it is ready: now", "started"))

    assert (line["message"], line["event"], line["node"]) == ("it is ready: now", "started", "n0")
