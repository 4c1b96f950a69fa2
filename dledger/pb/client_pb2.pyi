from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReadMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMITTED: _ClassVar[ReadMode]
    LINEARIZABLE: _ClassVar[ReadMode]
    LOCAL: _ClassVar[ReadMode]
COMMITTED: ReadMode
LINEARIZABLE: ReadMode
LOCAL: ReadMode

class Status(_message.Message):
    __slots__ = ("code", "message", "outcome_unknown", "leader_id", "leader_address", "error", "damage")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    outcome_unknown: bool
    leader_id: str
    leader_address: str
    error: str
    damage: Damage
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., outcome_unknown: _Optional[bool] = ..., leader_id: _Optional[str] = ..., leader_address: _Optional[str] = ..., error: _Optional[str] = ..., damage: _Optional[_Union[Damage, _Mapping]] = ...) -> None: ...

class Damage(_message.Message):
    __slots__ = ("path", "offset", "reason", "advice")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    path: str
    offset: int
    reason: str
    advice: str
    def __init__(self, path: _Optional[str] = ..., offset: _Optional[int] = ..., reason: _Optional[str] = ..., advice: _Optional[str] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("group", "bodies", "request_id", "ordered", "producer", "sequence")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BODIES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    group: str
    bodies: _containers.RepeatedScalarFieldContainer[bytes]
    request_id: int
    ordered: bool
    producer: str
    sequence: int
    def __init__(self, group: _Optional[str] = ..., bodies: _Optional[_Iterable[bytes]] = ..., request_id: _Optional[int] = ..., ordered: _Optional[bool] = ..., producer: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class StoredRun(_message.Message):
    __slots__ = ("first_index", "count", "term", "positions")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    count: int
    term: int
    positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_index: _Optional[int] = ..., count: _Optional[int] = ..., term: _Optional[int] = ..., positions: _Optional[_Iterable[int]] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("status", "request_id", "term", "first_index", "count", "positions", "duplicates")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    status: Status
    request_id: int
    term: int
    first_index: int
    count: int
    positions: _containers.RepeatedScalarFieldContainer[int]
    duplicates: _containers.RepeatedCompositeFieldContainer[StoredRun]
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., request_id: _Optional[int] = ..., term: _Optional[int] = ..., first_index: _Optional[int] = ..., count: _Optional[int] = ..., positions: _Optional[_Iterable[int]] = ..., duplicates: _Optional[_Iterable[_Union[StoredRun, _Mapping]]] = ...) -> None: ...

class ProducerRequest(_message.Message):
    __slots__ = ("group", "producer")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    group: str
    producer: str
    def __init__(self, group: _Optional[str] = ..., producer: _Optional[str] = ...) -> None: ...

class ProducerResponse(_message.Message):
    __slots__ = ("status", "next_sequence")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    status: Status
    next_sequence: int
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., next_sequence: _Optional[int] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("index", "term", "position", "magic", "body", "body_crc", "chain_crc")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    MAGIC_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    BODY_CRC_FIELD_NUMBER: _ClassVar[int]
    CHAIN_CRC_FIELD_NUMBER: _ClassVar[int]
    index: int
    term: int
    position: int
    magic: int
    body: bytes
    body_crc: int
    chain_crc: int
    def __init__(self, index: _Optional[int] = ..., term: _Optional[int] = ..., position: _Optional[int] = ..., magic: _Optional[int] = ..., body: _Optional[bytes] = ..., body_crc: _Optional[int] = ..., chain_crc: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("group", "first_index", "count", "max_bytes", "mode")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    group: str
    first_index: int
    count: int
    max_bytes: int
    mode: ReadMode
    def __init__(self, group: _Optional[str] = ..., first_index: _Optional[int] = ..., count: _Optional[int] = ..., max_bytes: _Optional[int] = ..., mode: _Optional[_Union[ReadMode, str]] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("status", "entries", "committed_index", "begin_index", "end_index")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_INDEX_FIELD_NUMBER: _ClassVar[int]
    BEGIN_INDEX_FIELD_NUMBER: _ClassVar[int]
    END_INDEX_FIELD_NUMBER: _ClassVar[int]
    status: Status
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    committed_index: int
    begin_index: int
    end_index: int
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., committed_index: _Optional[int] = ..., begin_index: _Optional[int] = ..., end_index: _Optional[int] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("group", "first_index", "mode")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    group: str
    first_index: int
    mode: ReadMode
    def __init__(self, group: _Optional[str] = ..., first_index: _Optional[int] = ..., mode: _Optional[_Union[ReadMode, str]] = ...) -> None: ...

class MetadataRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class MemberInfo(_message.Message):
    __slots__ = ("id", "peer_address", "client_address", "member_role", "number", "uid", "promote", "replaces")
    ID_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ROLE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    PROMOTE_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    id: str
    peer_address: str
    client_address: str
    member_role: str
    number: int
    uid: int
    promote: bool
    replaces: str
    def __init__(self, id: _Optional[str] = ..., peer_address: _Optional[str] = ..., client_address: _Optional[str] = ..., member_role: _Optional[str] = ..., number: _Optional[int] = ..., uid: _Optional[int] = ..., promote: _Optional[bool] = ..., replaces: _Optional[str] = ...) -> None: ...

class PeerProgress(_message.Message):
    __slots__ = ("id", "match_index", "next_index", "state", "lag_entries", "inflight", "last_contact_ms", "health", "lag_bytes", "rate", "not_ready")
    ID_FIELD_NUMBER: _ClassVar[int]
    MATCH_INDEX_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAG_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    LAST_CONTACT_MS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    LAG_BYTES_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_FIELD_NUMBER: _ClassVar[int]
    id: str
    match_index: int
    next_index: int
    state: str
    lag_entries: int
    inflight: int
    last_contact_ms: int
    health: str
    lag_bytes: int
    rate: int
    not_ready: str
    def __init__(self, id: _Optional[str] = ..., match_index: _Optional[int] = ..., next_index: _Optional[int] = ..., state: _Optional[str] = ..., lag_entries: _Optional[int] = ..., inflight: _Optional[int] = ..., last_contact_ms: _Optional[int] = ..., health: _Optional[str] = ..., lag_bytes: _Optional[int] = ..., rate: _Optional[int] = ..., not_ready: _Optional[str] = ...) -> None: ...

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

class MetadataResponse(_message.Message):
    __slots__ = ("status", "group", "node_id", "role", "term", "leader_id", "leader_address", "members", "begin_index", "end_index", "committed_index", "flushed_index", "begin_position", "end_position", "peers", "flush_mode", "disk_full", "pending_entries", "cluster_id", "voter", "version", "committed_position", "is_broker", "conditions", "role_age_ms", "grpc_port", "configuration_index", "configuration_term", "configuration_committed", "change_id", "applied_index", "snapshot_index", "snapshot_bytes")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_INDEX_FIELD_NUMBER: _ClassVar[int]
    END_INDEX_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_INDEX_FIELD_NUMBER: _ClassVar[int]
    FLUSHED_INDEX_FIELD_NUMBER: _ClassVar[int]
    BEGIN_POSITION_FIELD_NUMBER: _ClassVar[int]
    END_POSITION_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    FLUSH_MODE_FIELD_NUMBER: _ClassVar[int]
    DISK_FULL_FIELD_NUMBER: _ClassVar[int]
    PENDING_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    VOTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_POSITION_FIELD_NUMBER: _ClassVar[int]
    IS_BROKER_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    ROLE_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    GRPC_PORT_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_INDEX_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_TERM_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    CHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    APPLIED_INDEX_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_INDEX_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    status: Status
    group: str
    node_id: str
    role: str
    term: int
    leader_id: str
    leader_address: str
    members: _containers.RepeatedCompositeFieldContainer[MemberInfo]
    begin_index: int
    end_index: int
    committed_index: int
    flushed_index: int
    begin_position: int
    end_position: int
    peers: _containers.RepeatedCompositeFieldContainer[PeerProgress]
    flush_mode: str
    disk_full: bool
    pending_entries: int
    cluster_id: str
    voter: bool
    version: str
    committed_position: int
    is_broker: bool
    conditions: _containers.RepeatedCompositeFieldContainer[Condition]
    role_age_ms: int
    grpc_port: int
    configuration_index: int
    configuration_term: int
    configuration_committed: bool
    change_id: int
    applied_index: int
    snapshot_index: int
    snapshot_bytes: int
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., group: _Optional[str] = ..., node_id: _Optional[str] = ..., role: _Optional[str] = ..., term: _Optional[int] = ..., leader_id: _Optional[str] = ..., leader_address: _Optional[str] = ..., members: _Optional[_Iterable[_Union[MemberInfo, _Mapping]]] = ..., begin_index: _Optional[int] = ..., end_index: _Optional[int] = ..., committed_index: _Optional[int] = ..., flushed_index: _Optional[int] = ..., begin_position: _Optional[int] = ..., end_position: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[PeerProgress, _Mapping]]] = ..., flush_mode: _Optional[str] = ..., disk_full: _Optional[bool] = ..., pending_entries: _Optional[int] = ..., cluster_id: _Optional[str] = ..., voter: _Optional[bool] = ..., version: _Optional[str] = ..., committed_position: _Optional[int] = ..., is_broker: _Optional[bool] = ..., conditions: _Optional[_Iterable[_Union[Condition, _Mapping]]] = ..., role_age_ms: _Optional[int] = ..., grpc_port: _Optional[int] = ..., configuration_index: _Optional[int] = ..., configuration_term: _Optional[int] = ..., configuration_committed: _Optional[bool] = ..., change_id: _Optional[int] = ..., applied_index: _Optional[int] = ..., snapshot_index: _Optional[int] = ..., snapshot_bytes: _Optional[int] = ...) -> None: ...

class WatchRoleRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class RoleChange(_message.Message):
    __slots__ = ("node_id", "role", "term", "leader_id", "leader_address")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    role: str
    term: int
    leader_id: str
    leader_address: str
    def __init__(self, node_id: _Optional[str] = ..., role: _Optional[str] = ..., term: _Optional[int] = ..., leader_id: _Optional[str] = ..., leader_address: _Optional[str] = ...) -> None: ...

class TransferLeadershipRequest(_message.Message):
    __slots__ = ("group", "target")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    group: str
    target: str
    def __init__(self, group: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...

class TransferLeadershipResponse(_message.Message):
    __slots__ = ("status", "leader_id", "term")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    status: Status
    leader_id: str
    term: int
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., leader_id: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class AddMember(_message.Message):
    __slots__ = ("id", "host", "port", "learner", "replaces")
    ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    id: str
    host: str
    port: int
    learner: bool
    replaces: str
    def __init__(self, id: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., learner: _Optional[bool] = ..., replaces: _Optional[str] = ...) -> None: ...

class UpdateMember(_message.Message):
    __slots__ = ("id", "host", "port")
    ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    id: str
    host: str
    port: int
    def __init__(self, id: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class ChangeMembersRequest(_message.Message):
    __slots__ = ("group", "expected_index", "change_id", "add", "promote", "demote", "remove", "update")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    PROMOTE_FIELD_NUMBER: _ClassVar[int]
    DEMOTE_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    group: str
    expected_index: int
    change_id: int
    add: AddMember
    promote: str
    demote: str
    remove: str
    update: UpdateMember
    def __init__(self, group: _Optional[str] = ..., expected_index: _Optional[int] = ..., change_id: _Optional[int] = ..., add: _Optional[_Union[AddMember, _Mapping]] = ..., promote: _Optional[str] = ..., demote: _Optional[str] = ..., remove: _Optional[str] = ..., update: _Optional[_Union[UpdateMember, _Mapping]] = ...) -> None: ...

class ChangeMembersResponse(_message.Message):
    __slots__ = ("status", "configuration_index", "configuration_term", "change_id", "members")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_INDEX_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_TERM_FIELD_NUMBER: _ClassVar[int]
    CHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    status: Status
    configuration_index: int
    configuration_term: int
    change_id: int
    members: _containers.RepeatedCompositeFieldContainer[MemberInfo]
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., configuration_index: _Optional[int] = ..., configuration_term: _Optional[int] = ..., change_id: _Optional[int] = ..., members: _Optional[_Iterable[_Union[MemberInfo, _Mapping]]] = ...) -> None: ...

class FetchLogRequest(_message.Message):
    __slots__ = ("group", "first_index", "end_index", "max_bytes", "chunk_bytes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    END_INDEX_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    group: str
    first_index: int
    end_index: int
    max_bytes: int
    chunk_bytes: int
    def __init__(self, group: _Optional[str] = ..., first_index: _Optional[int] = ..., end_index: _Optional[int] = ..., max_bytes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...

class FetchLogResponse(_message.Message):
    __slots__ = ("status", "first_index", "count", "position", "committed_index", "begin_index", "segment_base", "data")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_INDEX_FIELD_NUMBER: _ClassVar[int]
    BEGIN_INDEX_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BASE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    status: Status
    first_index: int
    count: int
    position: int
    committed_index: int
    begin_index: int
    segment_base: int
    data: bytes
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., first_index: _Optional[int] = ..., count: _Optional[int] = ..., position: _Optional[int] = ..., committed_index: _Optional[int] = ..., begin_index: _Optional[int] = ..., segment_base: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("group", "indexes", "positions", "store_times_ms")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    STORE_TIMES_MS_FIELD_NUMBER: _ClassVar[int]
    group: str
    indexes: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    store_times_ms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[str] = ..., indexes: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., store_times_ms: _Optional[_Iterable[int]] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("index", "position")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    index: int
    position: int
    def __init__(self, index: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class LocateResponse(_message.Message):
    __slots__ = ("status", "places", "begin_index", "begin_position", "committed_index", "committed_position")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    BEGIN_INDEX_FIELD_NUMBER: _ClassVar[int]
    BEGIN_POSITION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_INDEX_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_POSITION_FIELD_NUMBER: _ClassVar[int]
    status: Status
    places: _containers.RepeatedCompositeFieldContainer[Place]
    begin_index: int
    begin_position: int
    committed_index: int
    committed_position: int
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., places: _Optional[_Iterable[_Union[Place, _Mapping]]] = ..., begin_index: _Optional[int] = ..., begin_position: _Optional[int] = ..., committed_index: _Optional[int] = ..., committed_position: _Optional[int] = ...) -> None: ...

class BlockDigestsRequest(_message.Message):
    __slots__ = ("group", "from_position", "end_position", "block_bytes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    END_POSITION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    group: str
    from_position: int
    end_position: int
    block_bytes: int
    def __init__(self, group: _Optional[str] = ..., from_position: _Optional[int] = ..., end_position: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class BlockDigest(_message.Message):
    __slots__ = ("position", "bytes", "crc32c", "first_index", "last_index", "chain_crc")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    LAST_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHAIN_CRC_FIELD_NUMBER: _ClassVar[int]
    position: int
    bytes: int
    crc32c: int
    first_index: int
    last_index: int
    chain_crc: int
    def __init__(self, position: _Optional[int] = ..., bytes: _Optional[int] = ..., crc32c: _Optional[int] = ..., first_index: _Optional[int] = ..., last_index: _Optional[int] = ..., chain_crc: _Optional[int] = ...) -> None: ...

class BlockDigestsResponse(_message.Message):
    __slots__ = ("status", "blocks", "begin_position", "committed_position", "committed_index")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_POSITION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_POSITION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_INDEX_FIELD_NUMBER: _ClassVar[int]
    status: Status
    blocks: _containers.RepeatedCompositeFieldContainer[BlockDigest]
    begin_position: int
    committed_position: int
    committed_index: int
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockDigest, _Mapping]]] = ..., begin_position: _Optional[int] = ..., committed_position: _Optional[int] = ..., committed_index: _Optional[int] = ...) -> None: ...

class CommandRequest(_message.Message):
    __slots__ = ("group", "commands", "producer", "sequence")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    group: str
    commands: _containers.RepeatedScalarFieldContainer[bytes]
    producer: str
    sequence: int
    def __init__(self, group: _Optional[str] = ..., commands: _Optional[_Iterable[bytes]] = ..., producer: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class CommandResponse(_message.Message):
    __slots__ = ("status", "results")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    status: Status
    results: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., results: _Optional[_Iterable[bytes]] = ...) -> None: ...

class QueryRequest(_message.Message):
    __slots__ = ("group", "request", "mode", "after_index", "wait_ms")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    AFTER_INDEX_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    group: str
    request: bytes
    mode: ReadMode
    after_index: int
    wait_ms: int
    def __init__(self, group: _Optional[str] = ..., request: _Optional[bytes] = ..., mode: _Optional[_Union[ReadMode, str]] = ..., after_index: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class QueryResponse(_message.Message):
    __slots__ = ("status", "result", "applied_index")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    APPLIED_INDEX_FIELD_NUMBER: _ClassVar[int]
    status: Status
    result: bytes
    applied_index: int
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., result: _Optional[bytes] = ..., applied_index: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("status", "index", "bytes")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    status: Status
    index: int
    bytes: int
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., index: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...
