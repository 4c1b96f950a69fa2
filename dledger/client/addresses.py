"""The addresses of nodes: given to the client, or advertised by the nodes.

A node's advertised address is right inside its own network and may be useless elsewhere: a container advertises
``n1:10921``, which only other containers can resolve, while the client reached it at a published port. So the address
at which a node has answered comes first. A node that has not answered is looked for at its advertised address only once
every given address has been tried, because it may be behind one of them.
"""

from __future__ import annotations

from typing import Final, TypeVar

KNOWN_MAX: Final = 64
"""The limit of remembered nodes of each kind, the most recent ones: addresses may change with every restart, for
years, and a server may report anything.
"""
_T = TypeVar("_T")


class AddressBook:
    """The known addresses of nodes. Not thread-safe: its owner's lock guards it."""

    def __init__(self, given: tuple[str, ...]) -> None:
        self._given = given
        self._untried = set(given)
        self._met: dict[str, str] = {}  # where each node answered last
        self._shared: dict[str, None] = {}  # where several nodes answer: a load balancer
        self._said: dict[str, str] = {}  # each node's advertised address
        self._hinted: dict[str, None] = {}  # advertised addresses without a node name; an ordered set

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address worth asking: the given ones, and once those were tried, the advertised ones of other nodes."""
        met = {node: at for node, at in self._met.items() if at not in self._shared}
        known = (*self._given, *met.values())
        if not self._untried:
            nodes_said = set(self._said.values())
            known += tuple(address for node, address in self._said.items() if node not in met)
            known += tuple(address for address in self._hinted if address not in nodes_said)
        return tuple(dict.fromkeys(known))

    def record_answer(self, address: str, node: str) -> None:
        """``node`` answered at ``address``."""
        self._untried.discard(address)
        if any(at == address and other != node for other, at in self._met.items()):
            _put_last(self._shared, address, None)
        _put_last(self._met, node, address)

    def record_tried(self, address: str) -> None:
        """``address`` was tried, whatever the outcome."""
        self._untried.discard(address)

    def record_advertised(self, node: str, address: str) -> None:
        """``node`` is advertised at ``address``."""
        _put_last(self._said, node, address)

    def find(self, node: str, said: str = "") -> str | None:
        """The address of a node advertised at ``said``; None if it may be behind a given one not yet tried."""
        at = self._met.get(node)
        if at is not None and at not in self._shared:
            return at
        said = said or self._said.get(node, "")
        if at is None and self._untried and said not in self._given:
            return None
        return said or at

    def find_advertised(self, said: str) -> str | None:
        """``find`` for a node known only by its advertised address."""
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
