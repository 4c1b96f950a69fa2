"""Where nodes are: at the addresses that a client was given, or where they say they are.

What a node says (its advertised address) is right inside its own network and may be useless elsewhere: a container says
``n1:10921``, which only other containers can resolve, while the client reached it at a published port. So what counts
first is where a node has answered. A node that has not is where it says it is only once every given address has been
tried: it may be behind one of them.
"""

from __future__ import annotations

from typing import Final, TypeVar

KNOWN_MAX: Final = 64
"""So many nodes are remembered of each kind, those heard of last: addresses may change with every restart, for years,
and a server may say anything."""
_T = TypeVar("_T")


class AddressBook:
    """What is known of nodes' addresses. Not thread-safe: its owner's lock guards it."""

    def __init__(self, given: tuple[str, ...]) -> None:
        self._given = given
        self._untried = set(given)
        self._met: dict[str, str] = {}  # where each node answered last
        self._shared: dict[str, None] = {}  # where several nodes answer: a load balancer
        self._said: dict[str, str] = {}  # where each node is said to be
        self._hinted: dict[str, None] = {}  # where some node is said to be; a set in order

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address worth asking: given ones, and once those were tried, where other nodes are said to be."""
        met = {node: at for node, at in self._met.items() if at not in self._shared}
        known = (*self._given, *met.values())
        if not self._untried:
            nodes_said = set(self._said.values())
            known += tuple(address for node, address in self._said.items() if node not in met)
            known += tuple(address for address in self._hinted if address not in nodes_said)
        return tuple(dict.fromkeys(known))

    def note_answer(self, address: str, node: str) -> None:
        """``node`` answered at ``address``."""
        self._untried.discard(address)
        if any(at == address and other != node for other, at in self._met.items()):
            _put_last(self._shared, address, None)
        _put_last(self._met, node, address)

    def note_tried(self, address: str) -> None:
        """``address`` was asked, whatever became of it."""
        self._untried.discard(address)

    def note_said(self, node: str, address: str) -> None:
        """``node`` is said to be at ``address``."""
        _put_last(self._said, node, address)

    def find(self, node: str, said: str = "") -> str | None:
        """The address of a node that is said to be at ``said``; None if it may be behind a given one not yet tried."""
        at = self._met.get(node)
        if at is not None and at not in self._shared:
            return at
        said = said or self._said.get(node, "")
        if at is None and self._untried and said not in self._given:
            return None
        return said or at

    def find_said(self, said: str) -> str | None:
        """As ``find``, for a node that is named only by where it is said to be."""
        for node, address in self._said.items():
            if address == said:
                return self.find(node, said)
        if self._untried and said not in self._given:
            return None
        _put_last(self._hinted, said, None)
        return said


def _put_last(known: dict[str, _T], key: str, value: _T) -> None:
    known.pop(key, None)
    known[key] = value
    if len(known) > KNOWN_MAX:
        del known[next(iter(known))]
