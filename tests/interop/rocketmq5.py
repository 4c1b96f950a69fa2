"""RocketMQ 5.5's own programs as processes: the name server, the broker, mqadmin and a client."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dledger_cli.local.group import free_ports
from tests.interop.rocketmq import command, environment_in
from tests.support.waiting import wait_until

TIMEOUT_S: Final = 240
PROXY_STARTS: Final = 6
ADMIN_TRIES: Final = 5
MODULE: Final = "rocketmq5"
_NOISE: Final = " |-INFO in org.apache.rocketmq."
"""In each line about the settings of its log."""
_ADMIN: Final = "org.apache.rocketmq.tools.command.MQAdminStartup"


@contextmanager
def _running(main: str, conf: Path, settings: Mapping[str, object]) -> Iterator[subprocess.Popen[bytes]]:
    directory = conf.parent
    directory.mkdir(parents=True, exist_ok=True)
    conf.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    words = command(MODULE, main, directory, "-c", str(conf))
    with conf.with_suffix(".out").open("ab") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment_in(directory))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def name_server(directory: Path) -> Iterator[str]:
    """A name server meanwhile, killed at the end; gives its address."""
    port = free_ports(1)[0]
    settings = {"listenPort": port, "kvConfigPath": directory / "kvConfig.json"}
    with _running("org.apache.rocketmq.namesrv.NamesrvStartup", directory / "namesrv.conf", settings):
        yield f"127.0.0.1:{port}"


@contextmanager
def broker(directory: Path, settings: Mapping[str, object]) -> Iterator[subprocess.Popen[bytes]]:
    """A broker meanwhile, with its store in ``directory``/store; killed at the end."""
    plain = {
        "storePathRootDir": directory / "store",
        "mappedFileSizeCommitLog": 8 << 20,
        "registerNameServerPeriod": 10_000,
        "brokerIP1": "127.0.0.1",
        "diskMaxUsedSpaceRatio": 99,
        "autoCreateTopicEnable": "true",
    }
    with _running("org.apache.rocketmq.broker.BrokerStartup", directory / "broker.conf", plain | dict(settings)) as one:
        yield one


@contextmanager
def proxy(directory: Path, name_servers: str, *, broker_conf: Path | None = None) -> Iterator[str]:
    """A proxy that has started meanwhile, killed at the end; gives the address for gRPC.

    For the brokers that the name servers know; with ``broker_conf`` it starts a broker of its own, with these settings.
    It ends if they do not answer in a second and a half, as on a busy machine; so it is started again.
    """
    directory.mkdir(parents=True, exist_ok=True)
    grpc_port, remoting_port = free_ports(2)
    settings = {
        "rocketMQClusterName": "DefaultCluster",
        "proxyMode": "LOCAL" if broker_conf is not None else "CLUSTER",
        "namesrvAddr": name_servers,
        "grpcServerPort": grpc_port,
        "remotingListenPort": remoting_port,
        "localServeAddr": "127.0.0.1",
    }
    conf = directory / "proxy.json"
    conf.write_text(json.dumps(settings))
    words = command(MODULE, "org.apache.rocketmq.proxy.ProxyStartup", directory, "-pc", str(conf))
    words += ["-n", name_servers, "-bc", str(broker_conf)] if broker_conf is not None else ["-n", name_servers]
    told = directory / "proxy.out"
    processes: list[subprocess.Popen[bytes]] = []

    def has_started() -> bool:
        if not processes or processes[-1].poll() is not None:
            assert len(processes) < PROXY_STARTS, told.read_text()[-4000:]
            with told.open("wb") as out:
                process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment_in(directory))
            processes.append(process)
        return b"startup successfully" in told.read_bytes()

    try:
        wait_until(has_started, "the proxy has started", TIMEOUT_S)
        yield f"127.0.0.1:{grpc_port}"
    finally:
        for one in processes:
            one.kill()
            one.wait()


def admin(directory: Path, *arguments: str) -> str:
    """What mqadmin prints, errors too; it ends with 0 even where a command fails."""
    return _run(_ADMIN, directory, *arguments)


def admin_in_time(directory: Path, *arguments: str) -> str:
    """The same of a command that changes nothing: again if it had no answer within three seconds.

    That is mqadmin's own limit, which no option changes, and on a busy machine it takes as long to load its classes.
    """
    for _ in range(ADMIN_TRIES - 1):
        printed = admin(directory, *arguments)
        if "RemotingTimeoutException" not in printed:
            return printed
    return admin(directory, *arguments)


def client(directory: Path, *arguments: str) -> list[str]:
    """The lines that our program with RocketMQ's client prints."""
    printed = _run("interop.Client5Main", directory, *arguments)
    return [line.removeprefix("> ") for line in printed.splitlines() if line.startswith("> ")]


def _run(main: str, directory: Path, *arguments: str) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    ended = subprocess.run(
        command(MODULE, main, directory, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
        env=environment_in(directory),
        check=False,
    )
    printed = "".join(line for line in ended.stdout.splitlines(keepends=True) if _NOISE not in line)
    if ended.returncode:
        raise AssertionError(f"{' '.join(arguments)} ended with {ended.returncode}:\n{printed}")
    return printed
