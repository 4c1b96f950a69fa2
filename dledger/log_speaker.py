"""Whose log lines a thread writes, in a process of several groups: the group that it works for at the moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_GROUP: Final[ContextVar[str]] = ContextVar("group", default="")


def speaking_group() -> str:
    """The group that this thread, or task, works for; empty: none in particular."""
    return _GROUP.get()


@contextmanager
def speaks_for(group: str) -> Iterator[None]:
    """Inside, lines are the group's."""
    before = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(before)
