from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Message(_message.Message):
    __slots__ = ("topic", "body", "properties", "queue_id", "flag", "sys_flag", "born_timestamp_ms", "reconsume_times", "property_string")
    class PropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_ID_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    SYS_FLAG_FIELD_NUMBER: _ClassVar[int]
    BORN_TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    RECONSUME_TIMES_FIELD_NUMBER: _ClassVar[int]
    PROPERTY_STRING_FIELD_NUMBER: _ClassVar[int]
    topic: str
    body: bytes
    properties: _containers.ScalarMap[str, str]
    queue_id: int
    flag: int
    sys_flag: int
    born_timestamp_ms: int
    reconsume_times: int
    property_string: bytes
    def __init__(self, topic: _Optional[str] = ..., body: _Optional[bytes] = ..., properties: _Optional[_Mapping[str, str]] = ..., queue_id: _Optional[int] = ..., flag: _Optional[int] = ..., sys_flag: _Optional[int] = ..., born_timestamp_ms: _Optional[int] = ..., reconsume_times: _Optional[int] = ..., property_string: _Optional[bytes] = ...) -> None: ...

class SendRequest(_message.Message):
    __slots__ = ("messages", "request_id", "no_wait", "packed_answer", "producer", "sequence")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    PACKED_ANSWER_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    request_id: int
    no_wait: bool
    packed_answer: bool
    producer: str
    sequence: int
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., request_id: _Optional[int] = ..., no_wait: _Optional[bool] = ..., packed_answer: _Optional[bool] = ..., producer: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class ProducerRequest(_message.Message):
    __slots__ = ("producer",)
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    producer: str
    def __init__(self, producer: _Optional[str] = ...) -> None: ...

class ProducerResponse(_message.Message):
    __slots__ = ("next_sequence",)
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    next_sequence: int
    def __init__(self, next_sequence: _Optional[int] = ...) -> None: ...

class SendResult(_message.Message):
    __slots__ = ("status", "outcome", "reason", "leader", "message_id", "offset", "queue_id", "queue_offset", "store_timestamp_ms")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    QUEUE_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    STORE_TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    status: str
    outcome: str
    reason: str
    leader: str
    message_id: str
    offset: int
    queue_id: int
    queue_offset: int
    store_timestamp_ms: int
    def __init__(self, status: _Optional[str] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., leader: _Optional[str] = ..., message_id: _Optional[str] = ..., offset: _Optional[int] = ..., queue_id: _Optional[int] = ..., queue_offset: _Optional[int] = ..., store_timestamp_ms: _Optional[int] = ...) -> None: ...

class StoredBatch(_message.Message):
    __slots__ = ("id_prefix", "offsets", "queue_ids", "queue_offsets", "store_timestamps_ms")
    ID_PREFIX_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_IDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    STORE_TIMESTAMPS_MS_FIELD_NUMBER: _ClassVar[int]
    id_prefix: str
    offsets: _containers.RepeatedScalarFieldContainer[int]
    queue_ids: _containers.RepeatedScalarFieldContainer[int]
    queue_offsets: _containers.RepeatedScalarFieldContainer[int]
    store_timestamps_ms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id_prefix: _Optional[str] = ..., offsets: _Optional[_Iterable[int]] = ..., queue_ids: _Optional[_Iterable[int]] = ..., queue_offsets: _Optional[_Iterable[int]] = ..., store_timestamps_ms: _Optional[_Iterable[int]] = ...) -> None: ...

class SendResponse(_message.Message):
    __slots__ = ("results", "request_id", "stored")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SendResult]
    request_id: int
    stored: StoredBatch
    def __init__(self, results: _Optional[_Iterable[_Union[SendResult, _Mapping]]] = ..., request_id: _Optional[int] = ..., stored: _Optional[_Union[StoredBatch, _Mapping]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("group", "topic", "queue_id", "offset", "max_messages", "max_bytes", "tag_expression", "wait_ms")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    QUEUE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAG_EXPRESSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    group: str
    topic: str
    queue_id: int
    offset: int
    max_messages: int
    max_bytes: int
    tag_expression: str
    wait_ms: int
    def __init__(self, group: _Optional[str] = ..., topic: _Optional[str] = ..., queue_id: _Optional[int] = ..., offset: _Optional[int] = ..., max_messages: _Optional[int] = ..., max_bytes: _Optional[int] = ..., tag_expression: _Optional[str] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("status", "next_offset", "min_offset", "max_offset", "records", "count", "incarnation")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    MIN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    MAX_OFFSET_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    status: str
    next_offset: int
    min_offset: int
    max_offset: int
    records: bytes
    count: int
    incarnation: int
    def __init__(self, status: _Optional[str] = ..., next_offset: _Optional[int] = ..., min_offset: _Optional[int] = ..., max_offset: _Optional[int] = ..., records: _Optional[bytes] = ..., count: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class QueryByIdRequest(_message.Message):
    __slots__ = ("message_id",)
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    def __init__(self, message_id: _Optional[str] = ...) -> None: ...

class QueryByKeyRequest(_message.Message):
    __slots__ = ("topic", "key", "max_messages", "begin_ms", "end_ms", "unique")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BEGIN_MS_FIELD_NUMBER: _ClassVar[int]
    END_MS_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    key: str
    max_messages: int
    begin_ms: int
    end_ms: int
    unique: bool
    def __init__(self, topic: _Optional[str] = ..., key: _Optional[str] = ..., max_messages: _Optional[int] = ..., begin_ms: _Optional[int] = ..., end_ms: _Optional[int] = ..., unique: _Optional[bool] = ...) -> None: ...

class RecordsResponse(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, records: _Optional[_Iterable[bytes]] = ...) -> None: ...

class QueueRequest(_message.Message):
    __slots__ = ("topic", "queue_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    QUEUE_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    queue_id: int
    def __init__(self, topic: _Optional[str] = ..., queue_id: _Optional[int] = ...) -> None: ...

class OffsetByTimeRequest(_message.Message):
    __slots__ = ("topic", "queue_id", "timestamp_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    QUEUE_ID_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    queue_id: int
    timestamp_ms: int
    def __init__(self, topic: _Optional[str] = ..., queue_id: _Optional[int] = ..., timestamp_ms: _Optional[int] = ...) -> None: ...

class OffsetResponse(_message.Message):
    __slots__ = ("offset",)
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    offset: int
    def __init__(self, offset: _Optional[int] = ...) -> None: ...

class QueueRangeResponse(_message.Message):
    __slots__ = ("min_offset", "max_offset", "last_update_ms")
    MIN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    MAX_OFFSET_FIELD_NUMBER: _ClassVar[int]
    LAST_UPDATE_MS_FIELD_NUMBER: _ClassVar[int]
    min_offset: int
    max_offset: int
    last_update_ms: int
    def __init__(self, min_offset: _Optional[int] = ..., max_offset: _Optional[int] = ..., last_update_ms: _Optional[int] = ...) -> None: ...

class TopicRangesRequest(_message.Message):
    __slots__ = ("topics",)
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, topics: _Optional[_Iterable[str]] = ...) -> None: ...

class TopicRange(_message.Message):
    __slots__ = ("topic", "queues")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    queues: _containers.RepeatedCompositeFieldContainer[QueueRangeResponse]
    def __init__(self, topic: _Optional[str] = ..., queues: _Optional[_Iterable[_Union[QueueRangeResponse, _Mapping]]] = ...) -> None: ...

class TopicRangesResponse(_message.Message):
    __slots__ = ("topics", "covered")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    COVERED_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[TopicRange]
    covered: int
    def __init__(self, topics: _Optional[_Iterable[_Union[TopicRange, _Mapping]]] = ..., covered: _Optional[int] = ...) -> None: ...

class NewestRequest(_message.Message):
    __slots__ = ("topic", "max_messages", "queue_id", "ends", "oldest_first", "since_ms", "before_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_ID_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    max_messages: int
    queue_id: int
    ends: _containers.RepeatedScalarFieldContainer[int]
    oldest_first: bool
    since_ms: int
    before_ms: int
    def __init__(self, topic: _Optional[str] = ..., max_messages: _Optional[int] = ..., queue_id: _Optional[int] = ..., ends: _Optional[_Iterable[int]] = ..., oldest_first: _Optional[bool] = ..., since_ms: _Optional[int] = ..., before_ms: _Optional[int] = ...) -> None: ...

class NewestResponse(_message.Message):
    __slots__ = ("records", "ends", "more")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedScalarFieldContainer[bytes]
    ends: _containers.RepeatedScalarFieldContainer[int]
    more: bool
    def __init__(self, records: _Optional[_Iterable[bytes]] = ..., ends: _Optional[_Iterable[int]] = ..., more: _Optional[bool] = ...) -> None: ...

class ConsumerOffset(_message.Message):
    __slots__ = ("topic", "queue_id", "offset")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    QUEUE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    topic: str
    queue_id: int
    offset: int
    def __init__(self, topic: _Optional[str] = ..., queue_id: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class CommitOffsetsRequest(_message.Message):
    __slots__ = ("group", "offsets", "reset", "incarnation")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    group: str
    offsets: _containers.RepeatedCompositeFieldContainer[ConsumerOffset]
    reset: bool
    incarnation: int
    def __init__(self, group: _Optional[str] = ..., offsets: _Optional[_Iterable[_Union[ConsumerOffset, _Mapping]]] = ..., reset: _Optional[bool] = ..., incarnation: _Optional[int] = ...) -> None: ...

class CommitOffsetsResponse(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    def __init__(self, incarnation: _Optional[int] = ...) -> None: ...

class CommitPositionRequest(_message.Message):
    __slots__ = ("group", "index", "position", "topics")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    group: str
    index: int
    position: int
    topics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, group: _Optional[str] = ..., index: _Optional[int] = ..., position: _Optional[int] = ..., topics: _Optional[_Iterable[str]] = ...) -> None: ...

class CommitPositionResponse(_message.Message):
    __slots__ = ("position", "offsets")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    position: int
    offsets: _containers.RepeatedCompositeFieldContainer[ConsumerOffset]
    def __init__(self, position: _Optional[int] = ..., offsets: _Optional[_Iterable[_Union[ConsumerOffset, _Mapping]]] = ...) -> None: ...

class FetchOffsetsRequest(_message.Message):
    __slots__ = ("group", "topic")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    group: str
    topic: str
    def __init__(self, group: _Optional[str] = ..., topic: _Optional[str] = ...) -> None: ...

class FetchOffsetsResponse(_message.Message):
    __slots__ = ("offsets", "incarnation")
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.RepeatedCompositeFieldContainer[ConsumerOffset]
    incarnation: int
    def __init__(self, offsets: _Optional[_Iterable[_Union[ConsumerOffset, _Mapping]]] = ..., incarnation: _Optional[int] = ...) -> None: ...

class GroupOffsetsRequest(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, groups: _Optional[_Iterable[str]] = ...) -> None: ...

class GroupOffsets(_message.Message):
    __slots__ = ("group", "offsets")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    group: str
    offsets: _containers.RepeatedCompositeFieldContainer[ConsumerOffset]
    def __init__(self, group: _Optional[str] = ..., offsets: _Optional[_Iterable[_Union[ConsumerOffset, _Mapping]]] = ...) -> None: ...

class GroupOffsetsResponse(_message.Message):
    __slots__ = ("groups", "covered")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    COVERED_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupOffsets]
    covered: int
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupOffsets, _Mapping]]] = ..., covered: _Optional[int] = ...) -> None: ...

class Topic(_message.Message):
    __slots__ = ("name", "read_queues", "write_queues", "permission")
    NAME_FIELD_NUMBER: _ClassVar[int]
    READ_QUEUES_FIELD_NUMBER: _ClassVar[int]
    WRITE_QUEUES_FIELD_NUMBER: _ClassVar[int]
    PERMISSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    read_queues: int
    write_queues: int
    permission: int
    def __init__(self, name: _Optional[str] = ..., read_queues: _Optional[int] = ..., write_queues: _Optional[int] = ..., permission: _Optional[int] = ...) -> None: ...

class PutTopicRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: Topic
    def __init__(self, topic: _Optional[_Union[Topic, _Mapping]] = ...) -> None: ...

class PutTopicResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteTopicRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteTopicResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteGroupRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTopicsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTopicsResponse(_message.Message):
    __slots__ = ("topics",)
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[Topic]
    def __init__(self, topics: _Optional[_Iterable[_Union[Topic, _Mapping]]] = ...) -> None: ...

class ListGroupsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListGroupsResponse(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, groups: _Optional[_Iterable[str]] = ...) -> None: ...

class DelayedRequest(_message.Message):
    __slots__ = ("level", "offset", "max_messages")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    level: int
    offset: int
    max_messages: int
    def __init__(self, level: _Optional[int] = ..., offset: _Optional[int] = ..., max_messages: _Optional[int] = ...) -> None: ...

class DelayLevel(_message.Message):
    __slots__ = ("level", "delay_ms", "next_offset", "end_offset", "next_due_ms")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NEXT_DUE_MS_FIELD_NUMBER: _ClassVar[int]
    level: int
    delay_ms: int
    next_offset: int
    end_offset: int
    next_due_ms: int
    def __init__(self, level: _Optional[int] = ..., delay_ms: _Optional[int] = ..., next_offset: _Optional[int] = ..., end_offset: _Optional[int] = ..., next_due_ms: _Optional[int] = ...) -> None: ...

class DelayedResponse(_message.Message):
    __slots__ = ("levels", "records")
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    levels: _containers.RepeatedCompositeFieldContainer[DelayLevel]
    records: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, levels: _Optional[_Iterable[_Union[DelayLevel, _Mapping]]] = ..., records: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Condition(_message.Message):
    __slots__ = ("kind", "message", "since_ms", "subject")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    since_ms: int
    subject: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., since_ms: _Optional[int] = ..., subject: _Optional[str] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("cluster", "broker_name", "node_id", "broker_role", "broker_id", "replicated", "raft_role", "term", "leader", "leader_address", "members", "min_offset", "max_offset", "end_offset", "dispatch_behind_bytes", "put_tps", "get_tps", "disk_ratio", "put_total", "get_total", "earliest_message_ms", "version", "boot_ms", "runtime", "conditions")
    class MembersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class RuntimeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    BROKER_NAME_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BROKER_ROLE_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICATED_FIELD_NUMBER: _ClassVar[int]
    RAFT_ROLE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MIN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    MAX_OFFSET_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_BEHIND_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUT_TPS_FIELD_NUMBER: _ClassVar[int]
    GET_TPS_FIELD_NUMBER: _ClassVar[int]
    DISK_RATIO_FIELD_NUMBER: _ClassVar[int]
    PUT_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GET_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EARLIEST_MESSAGE_MS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_MS_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    broker_name: str
    node_id: str
    broker_role: str
    broker_id: int
    replicated: bool
    raft_role: str
    term: int
    leader: str
    leader_address: str
    members: _containers.ScalarMap[str, str]
    min_offset: int
    max_offset: int
    end_offset: int
    dispatch_behind_bytes: int
    put_tps: float
    get_tps: float
    disk_ratio: float
    put_total: int
    get_total: int
    earliest_message_ms: int
    version: str
    boot_ms: int
    runtime: _containers.ScalarMap[str, str]
    conditions: _containers.RepeatedCompositeFieldContainer[Condition]
    def __init__(self, cluster: _Optional[str] = ..., broker_name: _Optional[str] = ..., node_id: _Optional[str] = ..., broker_role: _Optional[str] = ..., broker_id: _Optional[int] = ..., replicated: _Optional[bool] = ..., raft_role: _Optional[str] = ..., term: _Optional[int] = ..., leader: _Optional[str] = ..., leader_address: _Optional[str] = ..., members: _Optional[_Mapping[str, str]] = ..., min_offset: _Optional[int] = ..., max_offset: _Optional[int] = ..., end_offset: _Optional[int] = ..., dispatch_behind_bytes: _Optional[int] = ..., put_tps: _Optional[float] = ..., get_tps: _Optional[float] = ..., disk_ratio: _Optional[float] = ..., put_total: _Optional[int] = ..., get_total: _Optional[int] = ..., earliest_message_ms: _Optional[int] = ..., version: _Optional[str] = ..., boot_ms: _Optional[int] = ..., runtime: _Optional[_Mapping[str, str]] = ..., conditions: _Optional[_Iterable[_Union[Condition, _Mapping]]] = ...) -> None: ...

class Subscription(_message.Message):
    __slots__ = ("topic", "tag_expression")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TAG_EXPRESSION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    tag_expression: str
    def __init__(self, topic: _Optional[str] = ..., tag_expression: _Optional[str] = ...) -> None: ...

class MembershipRequest(_message.Message):
    __slots__ = ("group", "client_id", "subscriptions", "broadcast")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_FIELD_NUMBER: _ClassVar[int]
    group: str
    client_id: str
    subscriptions: _containers.RepeatedCompositeFieldContainer[Subscription]
    broadcast: bool
    def __init__(self, group: _Optional[str] = ..., client_id: _Optional[str] = ..., subscriptions: _Optional[_Iterable[_Union[Subscription, _Mapping]]] = ..., broadcast: _Optional[bool] = ...) -> None: ...

class MembershipResponse(_message.Message):
    __slots__ = ("client_ids", "warning")
    CLIENT_IDS_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    client_ids: _containers.RepeatedScalarFieldContainer[str]
    warning: str
    def __init__(self, client_ids: _Optional[_Iterable[str]] = ..., warning: _Optional[str] = ...) -> None: ...

class GroupQueue(_message.Message):
    __slots__ = ("topic", "queue_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    QUEUE_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    queue_id: int
    def __init__(self, topic: _Optional[str] = ..., queue_id: _Optional[int] = ...) -> None: ...

class LockQueuesRequest(_message.Message):
    __slots__ = ("group", "client_id", "queues")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    group: str
    client_id: str
    queues: _containers.RepeatedCompositeFieldContainer[GroupQueue]
    def __init__(self, group: _Optional[str] = ..., client_id: _Optional[str] = ..., queues: _Optional[_Iterable[_Union[GroupQueue, _Mapping]]] = ...) -> None: ...

class LockQueuesResponse(_message.Message):
    __slots__ = ("queues",)
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    queues: _containers.RepeatedCompositeFieldContainer[GroupQueue]
    def __init__(self, queues: _Optional[_Iterable[_Union[GroupQueue, _Mapping]]] = ...) -> None: ...

class UnlockQueuesRequest(_message.Message):
    __slots__ = ("group", "client_id", "queues")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    group: str
    client_id: str
    queues: _containers.RepeatedCompositeFieldContainer[GroupQueue]
    def __init__(self, group: _Optional[str] = ..., client_id: _Optional[str] = ..., queues: _Optional[_Iterable[_Union[GroupQueue, _Mapping]]] = ...) -> None: ...

class UnlockQueuesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SendBackRequest(_message.Message):
    __slots__ = ("group", "topic", "offset", "delay_level", "retries_max")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DELAY_LEVEL_FIELD_NUMBER: _ClassVar[int]
    RETRIES_MAX_FIELD_NUMBER: _ClassVar[int]
    group: str
    topic: str
    offset: int
    delay_level: int
    retries_max: int
    def __init__(self, group: _Optional[str] = ..., topic: _Optional[str] = ..., offset: _Optional[int] = ..., delay_level: _Optional[int] = ..., retries_max: _Optional[int] = ...) -> None: ...

class SendBackResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndTransactionRequest(_message.Message):
    __slots__ = ("group", "offset", "queue_offset", "state")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    QUEUE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    group: str
    offset: int
    queue_offset: int
    state: str
    def __init__(self, group: _Optional[str] = ..., offset: _Optional[int] = ..., queue_offset: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...

class EndTransactionResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: str
    def __init__(self, result: _Optional[str] = ...) -> None: ...

class ProducerMembershipRequest(_message.Message):
    __slots__ = ("group", "client_id")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    group: str
    client_id: str
    def __init__(self, group: _Optional[str] = ..., client_id: _Optional[str] = ...) -> None: ...

class TransactionCheck(_message.Message):
    __slots__ = ("record", "offset", "queue_offset")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    QUEUE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    offset: int
    queue_offset: int
    def __init__(self, record: _Optional[bytes] = ..., offset: _Optional[int] = ..., queue_offset: _Optional[int] = ...) -> None: ...

class ProducerMembershipResponse(_message.Message):
    __slots__ = ("check",)
    CHECK_FIELD_NUMBER: _ClassVar[int]
    check: TransactionCheck
    def __init__(self, check: _Optional[_Union[TransactionCheck, _Mapping]] = ...) -> None: ...
