"""RocketMQ 5's official client as a load: what happens without it and without a JDK."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.context import BenchSettings, Context
from benchmarks.figures import Figure
from benchmarks.peers import java, official_client
from benchmarks.processes import ChildError, PythonChild
from benchmarks.scenarios import gateway
from benchmarks.scenarios.gateway import Side
from benchmarks.targets import APACHE_GATEWAY, BARE_GRPC, TARGETS


class Client:
    """Answers each command as a gateway does that takes ``rate`` messages in a second."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._asked: list[dict[str, object]] = []

    def tell(self, command: dict[str, object]) -> None:
        self._asked.append(command)

    def hear(self, _timeout_s: float) -> dict[str, object]:
        command = self._asked.pop(0)
        count = 0 if command.get("seconds") == gateway.SUBSCRIBE_S else self._rate
        late_ms = [float(self._rate)] * int(str(command.get("count", 0)))
        return {"began": 1.0, "ended": 2.0, "count": count, "failed": 0, "cpu_s": 0.5, "late_ms": late_ms}


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(BenchSettings(), tmp_path, tmp_path, lambda _line: None)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is twice as fast as Apache's, and half as late."""

    def side(name: str, rate: int) -> Side:
        return Side(name, 0, [Client(rate) for _ in range(gateway.PROCESSES)])  # type: ignore[misc]  # it answers alike

    monkeypatch.setattr(official_client, "install", lambda: None)
    monkeypatch.setattr(java, "build", lambda *_modules: None)
    monkeypatch.setattr(gateway, "processor_s", lambda _pid: 0.0)
    monkeypatch.setattr(gateway, "_bare", lambda _context, _seconds: 400.0)
    monkeypatch.setattr(gateway, "_ours", lambda *_: side("ours", 100))
    monkeypatch.setattr(gateway, "_theirs", lambda *_: side("Apache's", 50))


def measured(context: Context) -> list[Figure]:
    return list(gateway.measure(context, frozenset(gateway.SCENARIO.names)))


def test_without_the_client_it_says_what_to_install(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure, which fails the run, and the reason."""

    def install() -> None:
        raise ChildError("there is no index")

    monkeypatch.setattr(official_client, "install", install)
    assert measured(context) == []
    assert context.missing == [
        f"baseline missing: RocketMQ 5's client: install {official_client.INSTALL}: there is no index"
    ]


@pytest.mark.usefixtures("sides")
def test_without_a_jdk_the_figures_have_no_baseline(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """And say what to install; only the bare server is beside it."""
    monkeypatch.setattr(java, "available", lambda: False)
    found = measured(context)
    missing = f"baseline missing: {APACHE_GATEWAY}: install {java.INSTALL}"
    assert context.missing == [missing]
    assert [(one.name, one.baseline, one.ratio) for one in found] == [
        (gateway.SEND, missing, None),
        (gateway.POP, missing, None),
        (gateway.SEND, BARE_GRPC, 1.0),
        (gateway.TIMED, missing, None),
    ]


@pytest.mark.usefixtures("sides")
def test_each_side_is_measured_alike(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are those of all processes together."""
    monkeypatch.setattr(java, "available", lambda: True)
    found = {(one.name, one.baseline): (one.value, one.ratio) for one in measured(context)}
    assert found == {
        (gateway.SEND, APACHE_GATEWAY): (400.0, 2.0),
        (gateway.POP, APACHE_GATEWAY): (400.0, 2.0),
        (gateway.SEND, BARE_GRPC): (400.0, 1.0),
        (gateway.TIMED, APACHE_GATEWAY): (100.0, 2.0),
    }


def test_every_figure_has_a_target() -> None:
    """None is measured for its own sake."""
    assert set(gateway.SCENARIO.names) <= TARGETS.keys()


def test_a_bare_server_answers_and_clients_count(tmp_path: Path) -> None:
    """The programs behind the baseline work together."""
    log = tmp_path / "log"
    with ExitStack() as stack:
        server = stack.enter_context(PythonChild("benchmarks.children.bare_grpc", ["serve"], log))
        words = ["call", f"127.0.0.1:{server.hear(60)['port']}", "0.2", "4", "100"]
        told = stack.enter_context(PythonChild("benchmarks.children.bare_grpc", words, log)).hear(60)
        assert told["count"] > 0
        assert told["began"] < told["ended"]
        assert server.ask({}, 60)["cpu_s"] > 0
