"""A Unix socket that only this process can connect to: its name exists only while listening starts.

gRPC listens on names only. An abstract name is open to every user of the machine, whatever TLS requires; a file in a
directory stays there when the process is killed. So the file is removed as soon as gRPC listens, and connections are
made through a descriptor of it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dledger.errors import ConfigError

_NAME: Final = "grpc"


class PrivateSocket:
    """The socket opened by ``listen``; connect to ``path`` until ``close``."""

    def __init__(self, listen: Callable[[str], object], spare_place: Path) -> None:
        """``listen`` gets gRPC's name for the socket. ``spare_place`` is for machines without a directory for such
        files.

        Raises ``ConfigError``.
        """
        directory = _directory(spare_place)
        try:
            place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                listen(f"unix:/proc/self/fd/{place}/{_NAME}")  # a path of its own could be too long for a socket
                self._fd = os.open(_NAME, os.O_PATH | os.O_CLOEXEC, dir_fd=place)
                os.unlink(_NAME, dir_fd=place)
            finally:
                os.close(place)
        finally:
            directory.rmdir()
        self.path: Final = f"/proc/self/fd/{self._fd}"

    def close(self) -> None:
        """Release the descriptor: no further connections."""
        os.close(self._fd)


def _directory(spare_place: Path) -> Path:
    problems = []
    for place in (None, spare_place):
        try:
            return Path(tempfile.mkdtemp(prefix="dledger-", dir=place))  # accessible to its owner only
        except OSError as error:
            problems.append(str(error))
    raise ConfigError([f"no directory for gRPC's socket ({'; '.join(problems)}): set TMPDIR"])
