"""RocketMQ's own programs as processes: the broker 4.9.7, mqadmin and clients 4.9.8."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dledger_cli.local.group import free_ports
from tests.interop.java import OPENED, SOURCES, JavaMissingError, environment

TIMEOUT_S: Final = 180
BUILD_TIMEOUT_S: Final = 600
"""Downloads included."""
TESTS_TIMEOUT_S: Final = 900
CPP_PACKAGE: Final = "rocketmq==0.4.4"
_OPTIONS: Final = (
    *("-Xms64m", "-Xmx256m", "-XX:MaxDirectMemorySize=128m"),
    *("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),  # most of what these programs do is to start
)


def class_path(module: str) -> str:
    """Of a module's programs; without what silences the log, which the broker configures itself."""
    target = SOURCES / module / "target"
    jars = (target / "class-path").read_text().strip().split(":")
    return ":".join([str(target / "classes"), *(one for one in jars if "slf4j-nop" not in one)])


def make_home(directory: Path) -> Path:
    """A directory that the programs take for RocketMQ's, with empty settings of their logs."""
    conf = directory / "rocketmq" / "conf"
    conf.mkdir(parents=True, exist_ok=True)
    for program in ("broker", "tools", "namesrv"):
        (conf / f"logback_{program}.xml").write_text("<configuration/>")
    return conf.parent


def junit(directory: Path, test: str, properties: Mapping[str, object]) -> str:
    """What JUnit prints of one class of RocketMQ's own integration tests."""
    directory.mkdir(parents=True, exist_ok=True)
    words = command("its", "org.junit.runner.JUnitCore", directory, test)
    settings = [f"-D{name}={value}" for name, value in properties.items()]
    ended = subprocess.run(
        [words[0], *settings, *words[1:]],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=TESTS_TIMEOUT_S,
        env=environment_in(directory),
        check=False,
    )
    return ended.stdout + ended.stderr


def command(module: str, main: str, directory: Path, *arguments: str) -> list[str]:
    """How to start a program of a module, with the directory as home."""
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED]
    home = f"-Duser.home={directory}"  # the libraries' log files go there
    return ["java", home, *_OPTIONS, *opened, "-cp", class_path(module), main, *arguments]


def environment_in(directory: Path) -> Mapping[str, str]:
    """The environment of a program with this home."""
    return environment() | {"ROCKETMQ_HOME": str(make_home(directory))}


def broker_port() -> int:
    """A free one; so are the one two below and the one above."""
    while True:
        (port,) = free_ports(1, companion=1)
        try:
            with socket.create_server(("127.0.0.1", port - 2)):
                return port
        except OSError:
            continue


def _settings(file: Path, settings: Mapping[str, object]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return str(file)


@contextmanager
def _running(main: str, conf: Path, settings: Mapping[str, object]) -> Iterator[subprocess.Popen[bytes]]:
    directory = conf.parent
    words = command("state", main, directory, "-c", _settings(conf, settings))
    with conf.with_suffix(".out").open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment_in(directory))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def broker(directory: Path, settings: Mapping[str, object]) -> Iterator[subprocess.Popen[bytes]]:
    """A broker meanwhile; killed at the end."""
    plain = {
        "storePathRootDir": directory / "store",
        "mappedFileSizeCommitLog": 8 << 20,
        "registerNameServerPeriod": 10_000,
        "brokerIP1": "127.0.0.1",
        "diskMaxUsedSpaceRatio": 99,
    }
    main = "org.apache.rocketmq.broker.BrokerStartup"
    with _running(main, directory / "broker.conf", plain | dict(settings)) as process:
        yield process


@contextmanager
def name_server(directory: Path, port: int = 0) -> Iterator[str]:
    """A name server meanwhile, killed at the end; gives its address. ``port`` 0: a free one."""
    port = port or free_ports(1)[0]
    settings: dict[str, object] = {"listenPort": port, "kvConfigPath": directory / "kvConfig.json"}
    settings["orderMessageEnable"] = "true"
    with _running("org.apache.rocketmq.namesrv.NamesrvStartup", directory / "namesrv.conf", settings):
        yield f"127.0.0.1:{port}"


def admin(directory: Path, *arguments: str) -> str:
    """What mqadmin prints. It ends with 0 even where a command fails."""
    return _run("org.apache.rocketmq.tools.command.MQAdminStartup", directory, *arguments)


def failed_admin(directory: Path, *arguments: str) -> str:
    """Why a command of mqadmin fails."""
    _, errors = _output("org.apache.rocketmq.tools.command.MQAdminStartup", directory, *arguments)
    assert "SubCommandException" in errors, f"{' '.join(arguments)} did not fail"
    return errors


def sign_as(directory: Path, access_key: str, secret_key: str) -> None:
    """Have mqadmin sign its requests."""
    tools = make_home(directory) / "conf" / "tools.yml"
    tools.write_text(f"accessKey: {access_key}\nsecretKey: {secret_key}\n")


def client(directory: Path, *arguments: str, key: tuple[str, str] | None = None) -> list[str]:
    """The lines that our program with RocketMQ's client prints; with a key and its secret it signs its requests."""
    variables = {} if key is None else {"INTEROP_ACCESS_KEY": key[0], "INTEROP_SECRET_KEY": key[1]}
    return _lines(_run("interop.ClientMain", directory, *arguments, variables=variables))


@contextmanager
def waiting_consumer(directory: Path, name_servers: str, topic: str) -> Iterator[None]:
    """Our program with RocketMQ's consumer meanwhile; killed at the end, before which it must not have ended."""
    directory.mkdir(parents=True, exist_ok=True)
    words = command("client", "interop.ClientMain", directory, "share", name_servers, topic, "0")
    output = directory / "consumer.out"
    with output.open("wb") as out:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=environment_in(directory)
        )
    try:
        yield
    finally:
        ended = process.poll()
        process.kill()
        process.communicate()
        if ended is not None:
            said = output.read_text("utf-8", "replace")[-4000:]
            raise AssertionError(f"the consumer of {name_servers} ended by itself with {ended}:\n{said}")


@contextmanager
def open_client(directory: Path, *arguments: str) -> Iterator[Callable[[], list[str]]]:
    """The same program meanwhile, until its input ends; gives what it has printed so far."""
    directory.mkdir(parents=True, exist_ok=True)
    output = directory / "client.out"
    with output.open("wb") as out:
        process = subprocess.Popen(
            command("client", "interop.ClientMain", directory, *arguments),
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment_in(directory),
        )

    def printed() -> list[str]:
        lines = output.read_text("utf-8", "replace").splitlines()
        return [line.removeprefix("> ") for line in lines if line.startswith("> ")]

    try:
        yield printed
    finally:
        process.kill()
        process.communicate()


@contextmanager
def open_admin(directory: Path, *arguments: str) -> Iterator[Callable[[], str]]:
    """A command of mqadmin that does not end meanwhile; gives what it has printed so far."""
    directory.mkdir(parents=True, exist_ok=True)
    output = directory / "admin.out"
    words = command("client", "org.apache.rocketmq.tools.command.MQAdminStartup", directory, *arguments)
    with output.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment_in(directory))
    try:
        yield lambda: output.read_text("utf-8", "replace")
    finally:
        process.kill()
        process.wait()


def _run(main: str, directory: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> str:
    output, errors = _output(main, directory, *arguments, variables=variables)
    assert "SubCommandException" not in errors, f"{' '.join(arguments)}:\n{errors}"
    return output


def _output(main: str, directory: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> tuple[str, str]:
    directory.mkdir(parents=True, exist_ok=True)
    ended = subprocess.run(
        command("client", main, directory, *arguments),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
        env={**environment_in(directory), **(variables or {})},
        check=False,
    )
    if ended.returncode:
        raise AssertionError(f"{' '.join(arguments)} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout, ended.stderr


def spring_application(directory: Path, *arguments: str) -> list[str]:
    """The lines that our application with Spring's starter prints."""
    directory.mkdir(parents=True, exist_ok=True)
    return _lines(_printed(command("spring", "interop.SpringMain", directory, *arguments), cwd=directory))


def build_go_client(directory: Path) -> None:
    """Make what ``go_client`` runs. Raises ``JavaMissingError``: there is no Go."""
    directory.mkdir(parents=True, exist_ok=True)
    if shutil.which("go") is None:
        raise JavaMissingError("`go` is not on the PATH: `make interop` needs Go 1.21 or newer")
    command = ["go", "build", "-o", str(_go_program(directory)), "."]
    _printed(command, cwd=SOURCES.parent / "go", variables={"GOTOOLCHAIN": "local"}, timeout_s=BUILD_TIMEOUT_S)


def go_client(directory: Path, *arguments: str) -> list[str]:
    """The lines that our program with RocketMQ's Go client prints, once built there."""
    return _lines(_printed([str(_go_program(directory)), *arguments], cwd=directory))


def _go_program(directory: Path) -> Path:
    return directory / "interop-go"


def install_cpp_client(directory: Path) -> None:
    """Get what ``cpp_client`` runs, from the Python index."""
    directory.mkdir(parents=True, exist_ok=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    _printed([*install, "--target", str(directory / "packages"), CPP_PACKAGE], cwd=SOURCES, timeout_s=BUILD_TIMEOUT_S)


def cpp_client(directory: Path, *arguments: str) -> list[str]:
    """The lines that our program with RocketMQ's C++ client prints, once installed there."""
    program = SOURCES.parent / "cpp" / "client.py"
    variables = {"PYTHONPATH": str(directory / "packages"), "HOME": str(directory)}  # it logs to the home directory
    return _lines(_printed([sys.executable, str(program), *arguments], cwd=directory, variables=variables))


def _printed(
    command: list[str], *, cwd: Path, variables: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> str:
    ended = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout_s,
        env=os.environ | (variables or {}),
        check=False,
    )
    if ended.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout


def _lines(printed: str) -> list[str]:
    return [line.removeprefix("> ") for line in printed.splitlines() if line.startswith("> ")]
