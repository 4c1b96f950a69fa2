"""How ``Admin`` reads what brokers and name servers answer. Everything raises ``BadAnswerError`` unless it says so."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, TypeVar

from dledger import properties
from dledger.errors import ConfigError, InvalidRequestError
from dledger.remoting.codes import RequestError
from dledger.remoting.frame import Frame
from dledger.values import address_text
from rocketstore.client.aio.errors import BadAnswerError, NotFoundError
from rocketstore.client.aio.routes import RoutedBroker
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.message.message import HostAddress, Message
from rocketstore.message.record import CorruptRecordError, decode_record
from rocketstore.remoting.body import Body
from rocketstore.remoting.headers import read_header

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_B = TypeVar("_B", bound=Body)
_H = TypeVar("_H", bound="DataclassInstance")


def decoded(records: bytes) -> list[Message]:
    """The messages of an answer, whose records follow each other. Raises ``BadAnswerError``."""
    found: list[Message] = []
    at = 0
    while at < len(records):
        size = int.from_bytes(records[at : at + 4], "big")
        if size < 4 or at + size > len(records):
            raise BadAnswerError(f"a broker answered with a record of {size} bytes at {at} of {len(records)}")
        try:
            found.append(decode_record(records[at : at + size]))
        except CorruptRecordError as error:
            raise BadAnswerError(f"a broker answered with an invalid record: {error}") from error
        at += size
    return found


def settings_of(answer: Frame, whose: str) -> dict[str, str]:
    """The settings of a broker by name."""
    try:
        return {one.key: one.value for one in properties.parse(answer.body.decode())}
    except (ConfigError, UnicodeDecodeError) as error:
        raise BadAnswerError(f"{whose} answered with settings that cannot be read: {error}") from error


def body_of(kind: type[_B], answer: Frame, whose: str) -> _B:
    try:
        return kind.decode(answer.body or b"{}")
    except RequestError as error:
        raise BadAnswerError(f"{whose} answered with a {kind.__name__} that cannot be read: {error}") from error


def header_of(kind: type[_H], answer: Frame) -> _H:
    try:
        return read_header(kind, answer.fields)
    except RequestError as error:
        raise BadAnswerError(f"an answer cannot be read: {error}") from error


def parsed_id(offset_id: str) -> tuple[HostAddress, int]:
    """The broker's address and the position in its log. Raises ``NotFoundError`` for a text that is no such id."""
    try:
        return parse_offset_message_id(offset_id)
    except InvalidRequestError as error:
        raise NotFoundError(str(error)) from error


def broker_of(host: HostAddress, brokers: Sequence[RoutedBroker]) -> str:
    """The name of the brokers with an address; or of the only ones, which may be reached at another one.

    Raises ``NotFoundError``.
    """
    address = address_text(str(ip_address(host.ip)), host.port)
    for one in brokers:
        if address in one.addresses.values():
            return one.name
    if len(brokers) == 1:
        return brokers[0].name
    raise NotFoundError(f"the id names the broker {address}, which none of these is")
