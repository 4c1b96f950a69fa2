"""Makes requests that change a group's members."""

from __future__ import annotations

import secrets

from dledger.errors import InvalidRequestError
from dledger.members import ANY_CONFIGURATION, ChangeKind, MemberChange
from dledger.types import LogIndex, NodeId
from dledger.values import parse_address

_CHANGE_ID_BITS = 62


def member_change(
    kind: ChangeKind | str,
    node_id: str,
    address: str = "",
    *,
    learner: bool = False,
    replaces: str = "",
    expected_index: int | None = None,
) -> MemberChange:
    """A request to ``add``, ``promote``, ``demote``, ``remove`` or ``update`` a member. Its id makes it a new one.

    ``address``: where the other members reach it, ``host:port``; for ``add`` and ``update``. ``learner``: an added
    member stays one. ``replaces``: the voter that leaves for it. ``expected_index``: the
    ``NodeStatus.configuration_index`` on which you decided; if the members have changed since, nothing is done. Raises
    ``InvalidRequestError``.
    """
    try:
        found = ChangeKind(kind)
        host, port = parse_address(address) if address else ("", 0)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    if (found in (ChangeKind.ADD, ChangeKind.UPDATE)) != bool(address):
        raise InvalidRequestError(f"to {found} a member {'takes no' if address else 'needs its'} address")
    return MemberChange(
        found,
        NodeId(node_id),
        1 + secrets.randbits(_CHANGE_ID_BITS),
        host,
        port,
        not learner,
        replaces,
        ANY_CONFIGURATION if expected_index is None else LogIndex(expected_index),
    )
