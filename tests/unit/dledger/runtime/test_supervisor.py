"""A thread that dies takes the node with it, once and audibly."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from dledger.runtime.threads import Supervisor


def _failing(error: Exception) -> Callable[[], None]:
    def target() -> None:
        raise error

    return target


def test_an_exception_in_a_thread_is_fatal_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Fail-stop: a dead thread may not leave a process that looks alive (house rule 19)."""
    reported: list[BaseException] = []
    supervisor = Supervisor(reported.append)
    error = ValueError("broken part")

    thread = supervisor.thread("part", _failing(error))
    with caplog.at_level(logging.CRITICAL, logger="dledger"):
        thread.start()
        thread.join()

    assert supervisor.fatal is error
    assert reported == [error]
    assert "broken part" in caplog.text
    assert "thread part" in caplog.text


def test_only_the_first_failure_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Later failures are consequences; the cause is what people must see."""
    reported: list[BaseException] = []
    supervisor = Supervisor(reported.append)
    first, second = ValueError("cause"), ValueError("consequence")

    supervisor.run(_failing(first))
    supervisor.run(_failing(second))

    assert reported == [first]
    assert supervisor.fatal is first
    assert "consequence" not in caplog.text


def test_a_thread_that_ends_normally_is_no_failure() -> None:
    """Stopping is not dying."""
    supervisor = Supervisor(lambda error: pytest.fail(str(error)))

    supervisor.run(lambda: None)

    assert supervisor.fatal is None
