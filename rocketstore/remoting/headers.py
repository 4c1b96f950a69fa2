"""The fields of each request and response, by code: one class per header, converted from and to texts.

A name on the wire is the attribute's in camel case, or given by ``Named``; sends have a form with one-letter names,
``Short``. Fields without a default are required.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from dledger.records import record
from dledger.remoting.codes import RequestError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# Notes to fields are no tuples: before Python 3.11.3, ``typing`` takes a type with an equal note for the same type, and
# as tuples ``Named("b")`` and ``Short("b")`` were equal.


@record(frozen=True, slots=True)
class Bits:
    """The width of a number on the wire."""

    width: int


@record(frozen=True, slots=True)
class Named:
    """The name of a field on the wire, if it is not the attribute's in camel case."""

    name: str


@record(frozen=True, slots=True)
class Short:
    """The one-letter name of a field in SEND_MESSAGE_V2 and similar requests."""

    name: str


Int32 = Annotated[int, Bits(32)]
Int64 = Annotated[int, Bits(64)]
_H = TypeVar("_H", bound="DataclassInstance")
_DIGITS: Final = re.compile(r"[+-]?[0-9]{1,19}")


class _Field(NamedTuple):
    name: str
    wire: str
    kind: type
    bits: int
    default: object
    """``MISSING``: it is required."""


@cache
def _plan(kind: type[Any], short: bool) -> tuple[_Field, ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple(_field(one, hints[one.name], short) for one in dataclasses.fields(kind))


def _field(one: dataclasses.Field[Any], hint: Any, short: bool) -> _Field:  # noqa: ANN401  # whatever type a field has
    wire, bits = camel(one.name), 0
    if get_origin(hint) is Annotated:  # nested annotations are merged into one
        hint, *notes = get_args(hint)
        for note in notes:
            if isinstance(note, Named) or (isinstance(note, Short) and short):
                wire = note.name
            elif isinstance(note, Bits):
                bits = note.width
    return _Field(one.name, wire, hint, bits, one.default)


def camel(name: str) -> str:
    """An attribute's name in Java's spelling."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def read_header(kind: type[_H], fields: Mapping[str, str], *, short: bool = False) -> _H:
    """Parse the header of a request or response. Raises ``RequestError`` if a field is missing or invalid."""
    values: dict[str, object] = {}
    for one in _plan(kind, short):
        text = fields.get(one.wire)
        if text is None:
            if one.default is dataclasses.MISSING:
                raise RequestError(f"the custom field <{one.wire}> is null")
            continue
        values[one.name] = _value(one, text)
    return kind(**values)


def _value(one: _Field, text: str) -> object:
    if one.kind is str:
        return text
    if one.kind is bool:
        return text.lower() == "true"
    limit = 1 << (one.bits - 1)
    if _DIGITS.fullmatch(text) is None or not -limit <= (number := int(text)) < limit:
        raise RequestError(f"the field <{one.wire}> must be a whole number of {one.bits} bits, not {text[:64]!r}")
    return number


def write_header(header: DataclassInstance, *, short: bool = False) -> dict[str, str]:
    """The fields of a header as texts, without those that have their default value."""
    fields: dict[str, str] = {}
    for one in _plan(type(header), short):
        value = getattr(header, one.name)
        if value == one.default:
            continue
        fields[one.wire] = ("true" if value else "false") if one.kind is bool else str(value)
    return fields


# One class per header. The docstring names the requests (or responses) that use it.


@record(frozen=True, slots=True)
class SendHeader:
    """SEND_MESSAGE, SEND_REPLY_MESSAGE; short: SEND_MESSAGE_V2, SEND_BATCH_MESSAGE, SEND_REPLY_MESSAGE_V2."""

    producer_group: Annotated[str, Short("a")]
    topic: Annotated[str, Short("b")]
    default_topic: Annotated[str, Short("c")]
    default_topic_queue_nums: Annotated[Int32, Short("d")]
    queue_id: Annotated[Int32, Short("e")]
    sys_flag: Annotated[Int32, Short("f")]
    born_timestamp: Annotated[Int64, Short("g")]
    flag: Annotated[Int32, Short("h")]
    properties: Annotated[str, Short("i")] = ""
    reconsume_times: Annotated[Int32, Short("j")] = 0
    unit_mode: Annotated[bool, Short("k")] = False
    max_reconsume_times: Annotated[Int32, Short("l")] = -1
    batch: Annotated[bool, Short("m")] = False


@record(frozen=True, slots=True)
class SendAnswer:
    """Answer to a send: ``msg_id`` is the offset id."""

    msg_id: str
    queue_id: Int32
    queue_offset: Int64
    transaction_id: str = ""
    recall_handle: str = ""


@record(frozen=True, slots=True)
class PullHeader:
    """PULL_MESSAGE."""

    consumer_group: str
    topic: str
    queue_id: Int32
    queue_offset: Int64
    max_msg_nums: Int32
    sys_flag: Int32
    commit_offset: Int64
    suspend_timeout_millis: Int64
    sub_version: Int64
    subscription: str = ""
    expression_type: str = ""


@record(frozen=True, slots=True)
class PullAnswer:
    """Answer to PULL_MESSAGE, whatever its code."""

    suggest_which_broker_id: Int64
    next_begin_offset: Int64
    min_offset: Int64
    max_offset: Int64
    incarnation: Int64 = 0
    """Ours, of a master: see ``rocketstore.remoting.extensions``."""


@record(frozen=True, slots=True)
class QueueHeader:
    """GET_MAX_OFFSET, GET_MIN_OFFSET, GET_EARLIEST_MSG_STORETIME."""

    topic: str
    queue_id: Int32


@record(frozen=True, slots=True)
class GroupQueueHeader:
    """QUERY_CONSUMER_OFFSET."""

    consumer_group: str
    topic: str
    queue_id: Int32
    set_zero_if_not_found: bool = True
    """RocketMQ 5's: whether a group without an offset in a queue that has all its messages is at 0."""


@record(frozen=True, slots=True)
class UpdateOffsetHeader:
    """UPDATE_CONSUMER_OFFSET."""

    consumer_group: str
    topic: str
    queue_id: Int32
    commit_offset: Int64


@record(frozen=True, slots=True)
class OffsetByTimeHeader:
    """SEARCH_OFFSET_BY_TIMESTAMP."""

    topic: str
    queue_id: Int32
    timestamp: Int64


@record(frozen=True, slots=True)
class OffsetAnswer:
    """Answer of the requests for an offset."""

    offset: Int64


@record(frozen=True, slots=True)
class TimestampAnswer:
    """Answer to GET_EARLIEST_MSG_STORETIME."""

    timestamp: Int64


@record(frozen=True, slots=True)
class QueryMessageHeader:
    """QUERY_MESSAGE."""

    topic: str
    key: str
    max_num: Int32
    begin_timestamp: Int64
    end_timestamp: Int64


@record(frozen=True, slots=True)
class QueryMessageAnswer:
    """Answer to QUERY_MESSAGE."""

    index_last_update_timestamp: Int64
    index_last_update_phyoffset: Int64


@record(frozen=True, slots=True)
class ViewMessageHeader:
    """VIEW_MESSAGE_BY_ID."""

    offset: Int64


@record(frozen=True, slots=True)
class SendBackHeader:
    """CONSUMER_SEND_MSG_BACK; a negative ``max_reconsume_times`` means the group's setting."""

    offset: Int64
    group: str
    delay_level: Int32
    origin_msg_id: str = ""
    origin_topic: str = ""
    unit_mode: bool = False
    max_reconsume_times: Int32 = -1


@record(frozen=True, slots=True)
class EndTransactionHeader:
    """END_TRANSACTION."""

    producer_group: str
    tran_state_table_offset: Int64
    commit_log_offset: Int64
    commit_or_rollback: Int32
    msg_id: str
    from_transaction_check: bool = False
    transaction_id: str = ""


@record(frozen=True, slots=True)
class CheckTransactionHeader:
    """CHECK_TRANSACTION_STATE."""

    tran_state_table_offset: Int64
    commit_log_offset: Int64
    msg_id: str = ""
    transaction_id: str = ""
    offset_msg_id: str = ""


@record(frozen=True, slots=True)
class UnregisterClientHeader:
    """UNREGISTER_CLIENT."""

    client_id: Annotated[str, Named("clientID")]
    producer_group: str = ""
    consumer_group: str = ""


@record(frozen=True, slots=True)
class GroupHeader:
    """GET_CONSUMER_LIST_BY_GROUP, NOTIFY_CONSUMER_IDS_CHANGED, GET_CONSUMER_CONNECTION_LIST."""

    consumer_group: str


@record(frozen=True, slots=True)
class ProducerGroupHeader:
    """GET_PRODUCER_CONNECTION_LIST."""

    producer_group: str


@record(frozen=True, slots=True)
class ResetClientOffsetHeader:
    """RESET_CONSUMER_CLIENT_OFFSET, INVOKE_BROKER_TO_RESET_OFFSET."""

    topic: str
    group: str
    timestamp: Int64
    is_force: bool


@record(frozen=True, slots=True)
class ConsumerStatusHeader:
    """GET_CONSUMER_STATUS_FROM_CLIENT, INVOKE_BROKER_TO_GET_CONSUMER_STATUS."""

    topic: str
    group: str
    client_addr: str = ""


@record(frozen=True, slots=True)
class RunningInfoHeader:
    """GET_CONSUMER_RUNNING_INFO."""

    consumer_group: str
    client_id: str
    jstack_enable: bool = False


@record(frozen=True, slots=True)
class ConsumeDirectlyHeader:
    """CONSUME_MESSAGE_DIRECTLY."""

    consumer_group: str
    client_id: str = ""
    msg_id: str = ""
    broker_name: str = ""


@record(frozen=True, slots=True)
class PushReplyHeader:
    """PUSH_REPLY_MESSAGE_TO_CLIENT."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int32
    queue_id: Int32
    sys_flag: Int32
    born_timestamp: Int64
    flag: Int32
    born_host: str
    store_host: str
    store_timestamp: Int64
    properties: str = ""
    reconsume_times: Int32 = 0
    unit_mode: bool = False


@record(frozen=True, slots=True)
class PutTopicHeader:
    """UPDATE_AND_CREATE_TOPIC."""

    topic: str
    default_topic: str
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    topic_filter_type: str
    order: bool
    topic_sys_flag: Int32 = 0
    attributes: str = ""
    """RocketMQ 5's: ``+name=value`` and ``-name``, with commas between them."""


@record(frozen=True, slots=True)
class TopicHeader:
    """DELETE_TOPIC_IN_BROKER, DELETE_TOPIC_IN_NAMESRV, GET_TOPIC_STATS_INFO, QUERY_TOPIC_CONSUME_BY_WHO,
    GET_TOPIC_CONFIG.
    """

    topic: str
    cluster_name: str = ""


@record(frozen=True, slots=True)
class GroupConfigHeader:
    """GET_SUBSCRIPTIONGROUP_CONFIG."""

    group: str


@record(frozen=True, slots=True)
class DeleteGroupHeader:
    """DELETE_SUBSCRIPTIONGROUP with the names of both releases: RocketMQ 5 calls the second field ``cleanOffset``."""

    group_name: str
    remove_offset: bool = False
    clean_offset: bool = False


@record(frozen=True, slots=True)
class ConsumeStatsHeader:
    """GET_CONSUME_STATS."""

    consumer_group: str
    topic: str = ""


@record(frozen=True, slots=True)
class BrokerConsumeStatsHeader:
    """GET_BROKER_CONSUME_STATS."""

    is_order: bool


@record(frozen=True, slots=True)
class ConsumeTimeSpanHeader:
    """QUERY_CONSUME_TIME_SPAN."""

    topic: str
    group: str


@record(frozen=True, slots=True)
class CorrectionOffsetHeader:
    """QUERY_CORRECTION_OFFSET."""

    compare_group: str
    topic: str
    filter_groups: str = ""


@record(frozen=True, slots=True)
class CloneOffsetHeader:
    """CLONE_GROUP_OFFSET."""

    src_group: str
    dest_group: str
    topic: str = ""
    offline: bool = False


@record(frozen=True, slots=True)
class StatsDataHeader:
    """VIEW_BROKER_STATS_DATA."""

    stats_name: str
    stats_key: str


@record(frozen=True, slots=True)
class ConsumeQueueHeader:
    """QUERY_CONSUME_QUEUE."""

    topic: str
    queue_id: Int32
    index: Int64
    count: Int32
    consumer_group: str = ""


@record(frozen=True, slots=True)
class RecallHeader:
    """RECALL_MESSAGE."""

    topic: str
    recall_handle: str
    producer_group: str = ""


@record(frozen=True, slots=True)
class RecallAnswer:
    """Answer to RECALL_MESSAGE: the message's unique key."""

    msg_id: str


@record(frozen=True, slots=True)
class ListTimedHeader:
    """LIST_TIMED: messages due at ``from_ms`` or later, by due time; empty: of any topic, with any key or id.

    ``from_offset``: of those due at ``from_ms`` itself, from this place on, as the answer before said.
    """

    topic: str = ""
    key: str = ""
    from_ms: Int64 = 0
    from_offset: Int64 = 0
    count: Int32 = 32


@record(frozen=True, slots=True)
class ResumeCheckHeader:
    """RESUME_CHECK_HALF_MESSAGE."""

    msg_id: str = ""


@record(frozen=True, slots=True)
class VersionAnswer:
    """Answer to GET_BROKER_CONFIG: ``version`` is the data version as JSON."""

    version: str


@record(frozen=True, slots=True)
class AclVersionAnswer:
    """Answer to GET_BROKER_CLUSTER_ACL_INFO: data versions as JSON, of all rules and by file."""

    version: str
    all_acl_file_version: str
    broker_name: str
    broker_addr: str
    cluster_name: str


@record(frozen=True, slots=True)
class RegisterBrokerHeader:
    """REGISTER_BROKER; ``body_crc32`` 0: not checked.

    Our extensions, which Java neither sends nor reads: ``dledger_term``, the Raft term in which the broker has its id,
    and ``dledger_all_topics``, whether the body has all of its topics and not only changed ones.
    """

    broker_name: str
    broker_addr: str
    cluster_name: str
    ha_server_addr: str
    broker_id: Int64
    compressed: bool = False
    body_crc32: Int32 = 0
    dledger_term: Int64 = -1
    dledger_all_topics: bool = False


@record(frozen=True, slots=True)
class RegisterBrokerAnswer:
    """Answer to REGISTER_BROKER."""

    ha_server_addr: str = ""
    master_addr: str = ""


@record(frozen=True, slots=True)
class BrokerHeader:
    """UNREGISTER_BROKER, QUERY_DATA_VERSION."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Int64


@record(frozen=True, slots=True)
class DataVersionAnswer:
    """Answer to QUERY_DATA_VERSION."""

    changed: bool


@record(frozen=True, slots=True)
class RouteHeader:
    """GET_ROUTEINFO_BY_TOPIC."""

    topic: str
    accept_standard_json_only: bool = False


@record(frozen=True, slots=True)
class BrokerNameHeader:
    """WIPE_WRITE_PERM_OF_BROKER, ADD_WRITE_PERM_OF_BROKER."""

    broker_name: str


@record(frozen=True, slots=True)
class WipedAnswer:
    """Answer to WIPE_WRITE_PERM_OF_BROKER."""

    wipe_topic_count: Int32


@record(frozen=True, slots=True)
class AddedAnswer:
    """Answer to ADD_WRITE_PERM_OF_BROKER."""

    add_topic_count: Int32


@record(frozen=True, slots=True)
class ClusterHeader:
    """GET_TOPICS_BY_CLUSTER."""

    cluster: str


@record(frozen=True, slots=True)
class KeyHeader:
    """GET_KV_CONFIG, DELETE_KV_CONFIG."""

    namespace: str
    key: str


@record(frozen=True, slots=True)
class KeyValueHeader:
    """PUT_KV_CONFIG."""

    namespace: str
    key: str
    value: str


@record(frozen=True, slots=True)
class ValueAnswer:
    """Answer to GET_KV_CONFIG."""

    value: str = ""


@record(frozen=True, slots=True)
class NamespaceHeader:
    """GET_KVLIST_BY_NAMESPACE."""

    namespace: str
