"""The port: what it answers, what it refuses, and that it ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPConnection

import pytest

from dledger.errors import ConfigError, ShutdownError
from dledger_cli.metrics import exporter
from dledger_cli.metrics.exporter import MetricsPort, text_page


def broken() -> tuple[HTTPStatus, str, bytes]:
    """A page of a node that stops."""
    raise ShutdownError("this node is stopping")


@pytest.fixture
def port() -> Iterator[int]:
    """Serves a good page, a bad one and a broken one."""
    pages = {
        "/good": text_page(lambda: (True, "well")),
        "/bad": text_page(lambda: (False, "not yet")),
        "/broken": broken,
    }
    server = MetricsPort("127.0.0.1", 0, pages)
    server.start()
    yield server.port
    server.stop()


def ask(port: int, path: str, method: str = "GET", *, host: str = "") -> tuple[int, str]:
    """Status and body."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_pages_say_whether_it_is_so(port: int) -> None:
    """Probes look at the status, people at the words; whatever follows a ? does not matter."""
    assert ask(port, "/good") == (200, "well\n")
    assert ask(port, "/good?x=1") == (200, "well\n")
    assert ask(port, "/good", "HEAD") == (200, "")
    assert ask(port, "/bad") == (503, "not yet\n")
    assert ask(port, "/broken") == (503, "this node is stopping\n")


@pytest.mark.parametrize("host", ["evil.com", "localhost.evil.com", "10.0.0.1:80", ""])
def test_a_page_of_another_name_gets_nothing_from_this_machine(port: int, host: str) -> None:
    """A browser here would give it what is served at loopback, if its name leads there."""
    assert ask(port, "/good", host=host)[0] == (421 if host else 200)
    assert ask(port, "/good", host=f"localhost:{port}") == (200, "well\n")
    assert ask(port, "/good", host=f"[::1]:{port}") == (200, "well\n")


def test_other_paths_and_methods_do_not_exist(port: int) -> None:
    """Nothing can be changed here."""
    status, body = ask(port, "/")
    assert (status, "/good" in body) == (404, True)
    assert ask(port, "/good", "POST")[0] == 501


def test_a_port_in_use_is_a_clear_error(port: int) -> None:
    """Whoever reads it knows which setting to change."""
    with pytest.raises(ConfigError, match=f"cannot serve metrics at 127.0.0.1:{port} .*metrics_port.*in use"):
        MetricsPort("127.0.0.1", port, {})


def test_a_host_of_another_machine_is_a_clear_error() -> None:
    """So is an address that cannot be listened on."""
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0 .*this machine does not have that address"):
        MetricsPort("192.0.2.1", 0, {})


def test_the_thread_ends_and_the_port_is_free_again() -> None:
    """Nothing of it keeps a stopped process alive; stopping twice, or what never ran, is no error."""
    server = MetricsPort("127.0.0.1", 0, {"/": text_page(lambda: (True, "well"))})
    server.start()
    server.stop()
    server.stop()
    MetricsPort("127.0.0.1", 0, {}).stop()

    assert not [one for one in threading.enumerate() if one.name == "dledger-metrics"]
    again = MetricsPort("127.0.0.1", server.port, {})
    again.stop()


def test_those_that_say_nothing_keep_no_probe_out(port: int) -> None:
    """More than there are places, and each says a byte now and then: the oldest makes room for who has a question."""
    silent = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(exporter.REQUESTS_MAX + 2)]
    try:
        for one in silent[2:]:
            one.send(b"G")
        for _ in range(3):
            assert ask(port, "/good") == (200, "well\n")
        assert [one.recv(1) for one in silent[:3]] == [b""] * 3
    finally:
        for one in silent:
            one.close()


def test_a_request_must_come_in_time_however_little_comes_at_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is no request: it is hung up on after the time for all of it."""
    monkeypatch.setattr(exporter, "REQUEST_TIMEOUT_S", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=0.1) as dripping:
        for _ in range(100):
            try:
                dripping.send(b"G")
                if dripping.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except OSError:
                return
    pytest.fail("it was never hung up on")


def test_no_more_are_answered_at_a_time_than_there_are_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are being answered stay; who comes then is hung up on."""
    monkeypatch.setattr(exporter, "REQUESTS_MAX", 2)
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slow() -> tuple[bool, str]:
        begun.release()
        go_on.wait(60)
        return True, "well"

    server = MetricsPort("127.0.0.1", 0, {"/slow": text_page(slow)})
    server.start()
    answers: list[tuple[int, str]] = []
    asking = [threading.Thread(target=lambda: answers.append(ask(server.port, "/slow"))) for _ in range(2)]
    try:
        for one in asking:
            one.start()
            assert begun.acquire(timeout=60)
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as refused:
            assert refused.recv(1) == b""
    finally:
        go_on.set()
        for one in asking:
            one.join()
        server.stop()

    assert answers == [(200, "well\n")] * 2
