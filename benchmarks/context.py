"""The context of a scenario: how long to measure, where to put data, and how to report progress."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from benchmarks.curves import Curve
from dledger.errors import ConfigError

QUIET_BUSY_SHARE_MAX = 0.10
"""A machine is quiet when other programs use less than this share of its processors."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How much to measure. The targets apply to the defaults; smaller values are for trials."""

    rounds: int = 3
    seconds: float = 10.0
    warmup_seconds: float = 2.0
    kills: int = 30
    log_gib: float = 10.0
    share: float = 1.0
    """Of the sizes that a scenario has beside these: messages, connections, gigabytes of data for Spark."""
    beside_peers: bool = True
    """Whether to measure beside programs for the JVM and etcd, whose groups take long to start."""
    directory: Path | None = None
    """Where data go; None: the system's temporary directory."""

    def sized(self, count: int) -> int:
        """``count`` of the full measurement, in this one."""
        return max(1, round(count * self.share))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> BenchSettings:
        """Read ``BENCH_ROUNDS``, ``BENCH_SECONDS``, ``BENCH_WARMUP_SECONDS``, ``BENCH_KILLS``, ``BENCH_LOG_GIB`` and
        ``BENCH_DIR``; ``QUICK=1`` has smaller defaults. Raises ``ConfigError`` with all problems.
        """
        quick = environment.get("QUICK", "") not in {"", "0"}
        default = QUICK if quick else cls()
        problems: list[str] = []

        def number(key: str, otherwise: float) -> float:
            text = environment.get(key, "")
            try:
                value = float(text) if text else otherwise
            except ValueError:
                value = -1
            if not value > 0:
                problems.append(f"{key}={text!r} must be a positive number")
            return value

        directory = environment.get("BENCH_DIR", "")
        settings = cls(
            rounds=int(number("BENCH_ROUNDS", default.rounds)),
            seconds=number("BENCH_SECONDS", default.seconds),
            warmup_seconds=number("BENCH_WARMUP_SECONDS", default.warmup_seconds),
            kills=int(number("BENCH_KILLS", default.kills)),
            log_gib=number("BENCH_LOG_GIB", default.log_gib),
            share=default.share,
            beside_peers=default.beside_peers,
            directory=Path(directory) if directory else None,
        )
        if settings.rounds < 1 or settings.kills < 1:
            problems.append("BENCH_ROUNDS and BENCH_KILLS must be at least 1")
        if settings.directory is not None and not settings.directory.is_dir():
            problems.append(f"BENCH_DIR={directory!r} must be a directory")
        if problems:
            raise ConfigError(problems)
        return settings


QUICK: Final = BenchSettings(
    rounds=1, seconds=1.0, warmup_seconds=0.5, kills=3, log_gib=0.5, share=0.05, beside_peers=False
)
"""Every figure in ten minutes, to see that nothing is broken or much slower; the figures themselves are rough."""


PEERS_LEFT_OUT: Final = "java peers and etcd left out: QUICK=1"


class Peer(Protocol):
    """The module of a program to compare with."""

    INSTALL: str
    """What to install for it."""

    def available(self) -> bool:
        """Whether it is installed."""


@dataclass(slots=True)
class Context:
    """One run of the benchmarks."""

    settings: BenchSettings
    directory: Path
    """For one scenario: emptied before the next one, because a scenario may write tens of gigabytes."""
    kept: Path
    """For files used by several scenarios; removed when the run ends."""
    say: Callable[[str], None]
    """Prints a line of progress."""
    quiet: bool = True
    """False once other programs were seen to use the machine."""
    curves: list[Curve] = field(default_factory=list)
    """Measured so far, to be drawn."""
    left_out: bool = False
    """Whether the current scenario has left out such a peer, and the figures that need it."""
    missing: list[str] = field(default_factory=list)
    """Figures that could not be measured because something is not installed, as sentences."""

    def has(self, peer: Peer) -> bool:
        """Whether a program for the JVM, or etcd, is measured too."""
        return self.settings.beside_peers and peer.available()

    def without(self, name: str, peer: Peer) -> str:
        """Report that it is not, for whatever reason; returns the text to use instead of its name."""
        if self.settings.beside_peers:
            return self.baseline_missing(name, peer.INSTALL)
        self.left_out = True
        return PEERS_LEFT_OUT

    def baseline_missing(self, peer: str, install: str) -> str:
        """Report that a peer is not installed; returns the text to use instead of its name."""
        message = f"baseline missing: {peer}: install {install}"
        if message not in self.missing:
            self.missing.append(message)
            self.say(f"!!! {message}")
        return message


def busy_share(seconds: float = 1.0, stat_file: Path = Path("/proc/stat")) -> float:
    """The share of all processor time that is used, or stolen by the host, during the next ``seconds``."""
    before = cpu_ticks(stat_file.read_text(encoding="ascii"))
    time.sleep(seconds)
    after = cpu_ticks(stat_file.read_text(encoding="ascii"))
    total = after[1] - before[1]
    return 1 - (after[0] - before[0]) / total if total > 0 else 0.0


def cpu_ticks(stat: str) -> tuple[int, int]:
    """``(idle, total)`` of the first line of ``/proc/stat``; waiting for a disk counts as idle."""
    values = [int(value) for value in stat.splitlines()[0].split()[1:9]]
    return values[3] + values[4], sum(values)


def file_system_of(directory: Path, mounts_file: Path = Path("/proc/self/mounts")) -> str:
    """The type of the file system that holds ``directory`` (a flush on tmpfs costs nothing)."""
    best, kind = "", "unknown"
    target = os.path.realpath(directory)
    for line in mounts_file.read_text(encoding="utf-8").splitlines():
        fields = line.split()
        mount = fields[1].replace("\\040", " ")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return kind
