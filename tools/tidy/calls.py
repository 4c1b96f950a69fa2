"""Records which of the product's functions an operation calls, on which thread and in which order.

``record`` notes every call of the product's own Python functions, including resumed coroutines, by threads started
inside it.
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
    """One call: its thread, file and function."""

    thread: str
    file: str
    function: str


class Recorder:
    """Notes calls while ``during`` runs."""

    def __init__(self) -> None:
        self._noted: list[tuple[str, CodeType]] = []
        self._is_on = False
        self._files: dict[str, str] = {}  # paths relative to the root; "" for files outside the product

    def note(self, frame: FrameType, event: str, _argument: object) -> None:
        """The profile function passed to ``setprofile``."""
        if self._is_on and event == "call":
            self._noted.append((threading.current_thread().name, frame.f_code))

    def during(self, action: Callable[[], object]) -> list[NotedCall]:
        """The calls, in order, from the start of ``action`` to its return."""
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
    """A recorder for this thread and for threads started inside the block."""
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
    """The number of calls of one operation, and the files that at least half of its repetitions went through.

    Calls are those of the repetition with the fewest: the others depend on how busy the machine is.
    """

    calls: int
    files: tuple[str, ...]


def cost(repetitions: Sequence[Sequence[NotedCall]]) -> Cost:
    """The cost of an operation, from the calls of each repetition."""
    seen = [{call.file for call in calls} for calls in repetitions]
    often = sorted(file for file in set().union(*seen) if 2 * sum(file in one for one in seen) >= len(seen))
    return Cost(min(map(len, repetitions)), tuple(often))
