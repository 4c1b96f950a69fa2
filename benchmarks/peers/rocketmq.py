"""RocketMQ's own client 4.9.8, three of its brokers (4.9.7) in DLedger mode, and a broker of 5.5 with its proxy."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import java
from benchmarks.processes import ChildError, LineChild, end, spawn_daemon
from dledger_cli.local.group import HOST, free_ports

MODULES: Final = ("client", "broker")
"""Of ``java.build``."""
BROKER_NAME: Final = "RaftNode01"
ANSWER_S: Final = 180.0
"""How much longer than its load a command may take."""
_GATEWAY_S: Final = 600.0
_CLIENT_HEAP: Final = ("-Xms512m", "-Xmx512m")
_BROKER_HEAP: Final = ("-Xms1g", "-Xmx1g", "-XX:MaxDirectMemorySize=1g")


class JavaLoad(LineChild):
    """A Java client of one cluster; see ``java/client``."""

    def __init__(self, directory: Path, name_server: str) -> None:
        directory.mkdir(parents=True)
        argv = java.command("client", "load.LoadMain", directory, name_server, heap=_CLIENT_HEAP)
        super().__init__("RocketMQ's client", argv, directory / "client.log", os.environ)

    def measure(self, what: str, topic: str, **options: object) -> dict[str, Any]:  # Any: the values of a JSON object
        """Run one load; its figures. Raises ``ChildError`` if nothing succeeded."""
        seconds = options.get("seconds", 0.0)
        assert isinstance(seconds, float)
        answer = self.ask({"do": what, "topic": topic, **options}, seconds + ANSWER_S)
        if not answer["count"]:
            raise ChildError(f"{what}: nothing succeeded, {answer['failed']} failed; the last one: {answer['failure']}")
        return answer


@contextlib.contextmanager
def java_brokers(directory: Path, name_server: str, size: int = 3) -> Iterator[None]:
    """Brokers with their data in ``directory`` and RocketMQ's defaults, registered with ``name_server``."""
    members = {f"n{number}": port for number, port in enumerate(free_ports(size))}
    peers = ";".join(f"{name}-{HOST}:{port}" for name, port in members.items())
    with contextlib.ExitStack() as stack:
        for name in members:
            settings = {
                "brokerClusterName": "JavaCluster",
                "brokerName": BROKER_NAME,
                "namesrvAddr": name_server,
                "enableDLegerCommitLog": "true",
                "dLegerGroup": BROKER_NAME,
                "dLegerPeers": peers,
                "dLegerSelfId": name,
            }
            _start(stack, directory / name, settings)
        yield


@contextlib.contextmanager
def java_pair(directory: Path, name_server: str) -> Iterator[None]:
    """A SYNC_MASTER and its slave, as ``java_brokers``; the slave follows after some seconds."""
    with contextlib.ExitStack() as stack:
        for number, role in enumerate(("SYNC_MASTER", "SLAVE")):
            settings = {
                "brokerClusterName": "JavaCluster",
                "brokerName": BROKER_NAME,
                "namesrvAddr": name_server,
                "brokerId": number,
                "brokerRole": role,
            }
            _start(stack, directory / role, settings)
        yield


@contextlib.contextmanager
def java_gateway(directory: Path, name_server: str) -> Iterator[tuple[str, int]]:
    """A broker without copies and its proxy in one process; gives the address for gRPC, and the process's id.

    Raises ``ChildError`` if it does not start.
    """
    grpc_port, remoting_port = free_ports(2)
    with contextlib.ExitStack() as stack:
        home = directory / "proxy"
        broker = {"brokerClusterName": "DefaultCluster", "brokerName": BROKER_NAME, "namesrvAddr": name_server}
        conf = _home(home, broker)
        proxy = {
            "rocketMQClusterName": "DefaultCluster",
            "proxyMode": "LOCAL",
            "namesrvAddr": name_server,
            "grpcServerPort": grpc_port,
            "remotingListenPort": remoting_port,
            "localServeAddr": HOST,
        }
        (home / "proxy.json").write_text(json.dumps(proxy), encoding="utf-8")
        words = ["-pc", str(home / "proxy.json"), "-n", name_server, "-bc", conf]
        argv = java.command("proxy", "org.apache.rocketmq.proxy.ProxyStartup", home, *words, heap=_BROKER_HEAP)
        log = home / "proxy.log"
        process = spawn_daemon(argv, log, {**os.environ, "ROCKETMQ_HOME": str(home)})
        stack.callback(end, process)
        deadline = time.monotonic() + _GATEWAY_S
        while b"startup successfully" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ChildError(f"Apache's proxy did not start:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.1)
        yield f"{HOST}:{grpc_port}", process.pid


def _start(stack: contextlib.ExitStack, home: Path, settings: Mapping[str, object]) -> None:
    """A broker until the stack ends it."""
    conf = _home(home, settings)
    argv = java.command("broker", "org.apache.rocketmq.broker.BrokerStartup", home, "-c", conf, heap=_BROKER_HEAP)
    environment = {**os.environ, "ROCKETMQ_HOME": str(home)}
    stack.callback(end, spawn_daemon(argv, home / "broker.log", environment))


def _home(home: Path, settings: Mapping[str, object]) -> str:
    """Make a broker's directory; gives the file of its settings."""
    (home / "conf").mkdir(parents=True)
    (home / "conf" / "logback_broker.xml").write_text("<configuration/>", encoding="utf-8")
    own = {"brokerIP1": HOST, "listenPort": _listen_port(), "storePathRootDir": home / "store"}
    return _written(home / "broker.conf", {**settings, **own})


def _written(file: Path, settings: Mapping[str, object]) -> str:
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()), encoding="utf-8")
    return str(file)


def _listen_port() -> int:
    """A free port; those two below (for clients) and one above (for slaves) are free, too."""
    while True:
        (port,) = free_ports(1, companion=1)
        with contextlib.suppress(OSError), socket.create_server((HOST, port - 2)):
            return port
