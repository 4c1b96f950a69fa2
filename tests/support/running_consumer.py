"""A consumer that handles messages on a thread of its own, as a program does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self, Unpack

from rocketstore.client import ConsumedMessage, Consumer
from rocketstore.client.aio.consumer_options import ConsumerSettings


class RunningConsumer:
    """A member of a group, from its beginning on unless ``options`` say otherwise; ``got`` is what it was given.

    It fails to handle messages that begin with ``fails``, if that is not empty. Options without a word: ``start`` is
    first, and offsets are committed twice a second.
    """

    def __init__(
        self,
        addresses: Sequence[str] | str | None,
        group: str,
        topic: str,
        *,
        name_servers: str | None = None,
        fails: str = "",
        **options: Unpack[ConsumerSettings],
    ) -> None:
        defaults: ConsumerSettings = {"start": "first", "timeout_s": 20.0, "commit_s": 0.5}
        self.got: list[tuple[int, str]] = []
        """Queue numbers and bodies, in order."""
        self._fails = fails
        self._topic = topic
        self.consumer = Consumer(
            addresses, name_servers=name_servers, group=group, topics=topic, **(defaults | options)
        )
        self._thread = threading.Thread(target=self.consumer.run, args=(self._take,))
        try:
            self.consumer.start()
        except BaseException:
            self.consumer.close()
            raise
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the group; what is done is committed. Idempotent."""
        self.consumer.close()
        self._thread.join()

    @property
    def bodies(self) -> list[str]:
        return [text for _, text in self.got]

    @property
    def queues(self) -> list[tuple[str, int]]:
        """Broker names and numbers of the topic's queues that it has."""
        return [(one.broker_name, one.queue_id) for one in self.consumer.queues if one.topic == self._topic]

    def _take(self, message: ConsumedMessage) -> None:
        text = message.body.decode()
        self.got.append((message.queue.queue_id, text))
        if self._fails and text.startswith(self._fails):
            raise ValueError("scripted")
