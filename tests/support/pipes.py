"""A named pipe that somebody writes into, as a shell's ``<(...)`` is."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def named_pipe(directory: Path, content: bytes) -> Iterator[Path]:
    """A pipe in ``directory`` that gives ``content`` once; afterwards all of it must have been taken."""
    path = directory / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(content,), daemon=True)
    writer.start()
    yield path
    writer.join(60)
    assert not writer.is_alive(), "nobody reads the pipe"
