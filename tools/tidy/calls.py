"""Which functions of the product an operation calls, on which thread and in which order.

``record`` notes every call of the product's own Python functions, resumed coroutines included, by threads that were
started inside it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import dledger
from tools.tidy.census import PACKAGES

ROOT: Final = Path(dledger.__file__).parents[1]


@dataclass(frozen=True, slots=True)
class NotedCall:
    """One call: by which thread, of which function in which file."""

    thread: str
    file: str
    function: str


class Recorder:
    """Notes calls while ``during`` runs."""

    def __init__(self) -> None:
        self._noted: list[tuple[str, CodeType]] = []
        self._is_on = False
        self._files: dict[str, str] = {}  # those of the product, as they stand below the root; "" for all others

    def note(self, frame: FrameType, event: str, _argument: object) -> None:
        """What ``setprofile`` calls."""
        if self._is_on and event == "call":
            self._noted.append((threading.current_thread().name, frame.f_code))

    def during(self, action: Callable[[], object]) -> list[NotedCall]:
        """What was called, in order, from the call of ``action`` to its return."""
        self._noted = []
        self._is_on = True
        try:
            action()
        finally:
            self._is_on = False
        calls = (NotedCall(thread, self._file_of(code), code.co_qualname) for thread, code in self._noted)
        return [call for call in calls if call.file]

    def _file_of(self, code: CodeType) -> str:
        name = code.co_filename
        if name not in self._files:
            path = Path(name)
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
            self._files[name] = path.relative_to(ROOT).as_posix() if inside else ""
        return self._files[name]


@contextmanager
def record() -> Iterator[Recorder]:
    """A recorder for this thread and those that are started before the end of the block."""
    recorder = Recorder()
    before = sys.getprofile()
    threading.setprofile(recorder.note)
    sys.setprofile(recorder.note)
    try:
        yield recorder
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one operation: its calls, and the files that at least half of its repetitions went through.

    The calls are those of the repetition with the fewest: what else comes depends on how busy the machine is.
    """

    calls: int
    files: tuple[str, ...]


def cost(repetitions: Sequence[Sequence[NotedCall]]) -> Cost:
    """Of the calls of each repetition."""
    seen = [{call.file for call in calls} for calls in repetitions]
    often = sorted(file for file in set().union(*seen) if 2 * sum(file in one for one in seen) >= len(seen))
    return Cost(min(map(len, repetitions)), tuple(often))
