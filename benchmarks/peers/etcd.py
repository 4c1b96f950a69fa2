"""Three etcd processes on loopback, and two of its gRPC calls, encoded by hand.

The messages are so small that three functions replace etcd's generated protobuf code: ``PutRequest`` is key = field 1
and value = field 2; ``StatusResponse`` has the header (its member id = field 2) as field 1 and the leader as field 4.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc

from benchmarks.processes import ChildError, end, spawn_daemon
from dledger_cli.local.group import free_ports

INSTALL = "etcd (Debian: apt-get install etcd-server)"
RPC_TIMEOUT_SECONDS = 5.0
CHANNEL_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200))
"""A restarted member is reached at once, instead of after gRPC's default back-off of seconds."""


def available() -> bool:
    """Whether etcd is installed."""
    return shutil.which("etcd") is not None


def varint(value: int) -> bytes:
    """Protobuf's variable-length integer."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(message: bytes, offset: int) -> tuple[int, int]:
    """The integer at ``offset`` and the offset after it."""
    value = shift = 0
    while True:
        byte = message[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, offset


def put_request(key: bytes, value: bytes) -> bytes:
    """``etcdserverpb.PutRequest``."""
    return b"\x0a" + varint(len(key)) + key + b"\x12" + varint(len(value)) + value


def fields(message: bytes) -> dict[int, int | bytes]:
    """A message's varint and length-delimited fields by number; the last one of each wins."""
    found: dict[int, int | bytes] = {}
    offset = 0
    while offset < len(message):
        tag, offset = read_varint(message, offset)
        if tag & 7 == 0:
            found[tag >> 3], offset = read_varint(message, offset)
        elif tag & 7 == 2:
            size, offset = read_varint(message, offset)
            found[tag >> 3] = message[offset : offset + size]
            offset += size
        else:
            raise ChildError(f"etcd sent a field of wire type {tag & 7}, which none of its messages used here has")
    return found


def leads(status_response: bytes) -> bool:
    """Whether the member that sent this ``StatusResponse`` is the leader."""
    status = fields(status_response)
    header = status.get(1, b"")
    leader = status.get(4, 0)
    return leader != 0 and isinstance(header, bytes) and fields(header).get(2) == leader


class EtcdGroup:
    """A running group: its members' processes by client endpoint."""

    def __init__(self, start: Mapping[str, Callable[[], subprocess.Popen[bytes]]], stack: contextlib.ExitStack) -> None:
        self._start = start
        self._processes = {endpoint: begin() for endpoint, begin in start.items()}
        self._channels = {
            endpoint: stack.enter_context(grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS))
            for endpoint in start
        }

    def leader(self, timeout_seconds: float = 30.0) -> str:
        """The leader's endpoint, once there is one."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            for endpoint, process in self._processes.items():
                if process.poll() is None and self._leads(endpoint):
                    return endpoint
            time.sleep(0.05)
        raise ChildError(f"no etcd member became leader in {timeout_seconds:g} s")

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Of all members."""
        return tuple(self._start)

    def pid(self, endpoint: str) -> int:
        """The process id of one member."""
        return self._processes[endpoint].pid

    def kill(self, endpoint: str) -> None:
        """SIGKILL one member, and wait until it is gone."""
        self._processes[endpoint].kill()
        self._processes[endpoint].wait()

    def restart(self, endpoint: str) -> None:
        """Start a killed member again and wait until it knows a leader."""
        self._processes[endpoint] = self._start[endpoint]()
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            if self._status(endpoint).get(4, 0):
                return
            time.sleep(0.05)
        raise ChildError(f"etcd at {endpoint} did not come back; see its log")

    def first_put_after_kill(self, value: bytes) -> float:
        """Kill the leader; the seconds until one of the others has taken a value."""
        dead = self.leader()
        others = [endpoint for endpoint in self._processes if endpoint != dead]
        self.kill(dead)
        started = time.perf_counter()
        while time.perf_counter() < started + 30.0:
            for endpoint in others:
                put = self._channels[endpoint].unary_unary("/etcdserverpb.KV/Put", _raw, _raw)
                try:
                    put(put_request(b"bench", value), timeout=0.2)
                except grpc.RpcError:
                    continue  # no leader yet: the next one is asked
                took = time.perf_counter() - started
                self.restart(dead)
                return took
        raise ChildError("etcd took no put within 30 s of its leader's death")

    def putter(self) -> Callable[[bytes], None]:
        """A function that puts one value through the leader and returns when a quorum has it on disk."""
        call = self._channels[self.leader()].unary_unary("/etcdserverpb.KV/Put", _raw, _raw)

        def put(value: bytes) -> None:
            call(put_request(b"bench", value), timeout=RPC_TIMEOUT_SECONDS)

        return put

    def close(self) -> None:
        """End every member by its id."""
        for process in self._processes.values():
            end(process)

    def _leads(self, endpoint: str) -> bool:
        return leads(self._raw_status(endpoint))

    def _status(self, endpoint: str) -> dict[int, int | bytes]:
        return fields(self._raw_status(endpoint))

    def _raw_status(self, endpoint: str) -> bytes:
        status = self._channels[endpoint].unary_unary("/etcdserverpb.Maintenance/Status", _raw, _raw)
        try:
            return bytes(status(b"", timeout=1.0))
        except grpc.RpcError:
            return b""  # not up yet, or just killed: the caller asks again


def _raw(message: bytes) -> bytes:
    return message


@contextlib.contextmanager
def etcd_group(directory: Path, size: int = 3) -> Iterator[EtcdGroup]:
    """Start members with their data in ``directory`` and etcd's default timers; end them by id afterwards."""
    directory.mkdir(parents=True)
    ports = free_ports(2 * size)
    peers, clients = ports[:size], ports[size:]
    cluster = ",".join(f"m{number}=http://127.0.0.1:{port}" for number, port in enumerate(peers))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
    if platform.machine() not in {"x86_64", "amd64"}:
        environment["ETCD_UNSUPPORTED_ARCH"] = {"aarch64": "arm64"}.get(platform.machine(), platform.machine())
    with contextlib.ExitStack() as stack:
        members: dict[str, Callable[[], subprocess.Popen[bytes]]] = {}
        for number, (peer, client) in enumerate(zip(peers, clients, strict=True)):
            peer_url, client_url = f"http://127.0.0.1:{peer}", f"http://127.0.0.1:{client}"
            argv = ["etcd", "--name", f"m{number}", "--data-dir", str(directory / f"m{number}")]
            argv += ["--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url]
            argv += ["--listen-client-urls", client_url, "--advertise-client-urls", client_url]
            argv += ["--initial-cluster", cluster, "--initial-cluster-state", "new"]
            log = directory / f"m{number}.log"
            members[f"127.0.0.1:{client}"] = functools.partial(spawn_daemon, argv, log, environment)
        group = EtcdGroup(members, stack)
        stack.callback(group.close)
        yield group
