"""Queues of effects that several threads carry out in one order: filled under the node's lock, emptied outside it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

from dledger.core.messages import Message
from dledger.runtime.worker import Worker

Effect = TypeVar("Effect")


class EffectLane(Generic[Effect]):
    """Queued effects of one kind; ``queue`` is filled under the node's lock, emptied under ``sending``."""

    def __init__(self) -> None:
        self.queue: deque[Effect] = deque()
        self.sending = threading.Lock()


class PushLane(EffectLane[Message]):
    """Pushes to one peer. One that must be read from the disk is left to ``reader``, with all behind it."""

    reader: Worker

    def __init__(self, pushes_max: int) -> None:
        super().__init__()
        self._pushes_max = pushes_max
        self.is_reading = False
        """The reader is processing the queue, or will."""
        self.overflowed = False
        """The reader took too long, and pushes were dropped: the dispatcher must compare again."""

    def put(self, push: Message) -> None:
        """Queue a push; under the node's lock."""
        if len(self.queue) < self._pushes_max:
            self.queue.append(push)
        else:
            self.overflowed = True
