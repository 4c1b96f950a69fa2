from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Header(_message.Message):
    __slots__ = ("cluster_id", "group", "sender", "target")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    group: str
    sender: str
    target: str
    def __init__(self, cluster_id: _Optional[str] = ..., group: _Optional[str] = ..., sender: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...

class EntryId(_message.Message):
    __slots__ = ("term", "index")
    TERM_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    term: int
    index: int
    def __init__(self, term: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class VoteRequest(_message.Message):
    __slots__ = ("term", "last", "pre_vote", "transfer", "remembered", "committed", "countersign")
    TERM_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    PRE_VOTE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    COUNTERSIGN_FIELD_NUMBER: _ClassVar[int]
    term: int
    last: EntryId
    pre_vote: bool
    transfer: bool
    remembered: EntryId
    committed: _containers.RepeatedCompositeFieldContainer[ChainCrc]
    countersign: int
    def __init__(self, term: _Optional[int] = ..., last: _Optional[_Union[EntryId, _Mapping]] = ..., pre_vote: _Optional[bool] = ..., transfer: _Optional[bool] = ..., remembered: _Optional[_Union[EntryId, _Mapping]] = ..., committed: _Optional[_Iterable[_Union[ChainCrc, _Mapping]]] = ..., countersign: _Optional[int] = ...) -> None: ...

class VoteResponse(_message.Message):
    __slots__ = ("term", "granted", "pre_vote", "result", "standing", "boot_id", "used", "remembered", "leads", "begin", "committed", "other_history", "uid", "removed_at")
    TERM_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    PRE_VOTE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    OTHER_HISTORY_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    REMOVED_AT_FIELD_NUMBER: _ClassVar[int]
    term: int
    granted: bool
    pre_vote: bool
    result: int
    standing: int
    boot_id: int
    used: bool
    remembered: EntryId
    leads: bool
    begin: Install
    committed: _containers.RepeatedCompositeFieldContainer[ChainCrc]
    other_history: bool
    uid: int
    removed_at: int
    def __init__(self, term: _Optional[int] = ..., granted: _Optional[bool] = ..., pre_vote: _Optional[bool] = ..., result: _Optional[int] = ..., standing: _Optional[int] = ..., boot_id: _Optional[int] = ..., used: _Optional[bool] = ..., remembered: _Optional[_Union[EntryId, _Mapping]] = ..., leads: _Optional[bool] = ..., begin: _Optional[_Union[Install, _Mapping]] = ..., committed: _Optional[_Iterable[_Union[ChainCrc, _Mapping]]] = ..., other_history: _Optional[bool] = ..., uid: _Optional[int] = ..., removed_at: _Optional[int] = ...) -> None: ...

class Watermark(_message.Message):
    __slots__ = ("node_id", "last")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    last: EntryId
    def __init__(self, node_id: _Optional[str] = ..., last: _Optional[_Union[EntryId, _Mapping]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("term", "read_sequence", "client_address", "transfer_target", "readmit_boot_id", "readmit_index", "founded", "watermarks", "doubted_boot_id", "countersign")
    TERM_FIELD_NUMBER: _ClassVar[int]
    READ_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TARGET_FIELD_NUMBER: _ClassVar[int]
    READMIT_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    READMIT_INDEX_FIELD_NUMBER: _ClassVar[int]
    FOUNDED_FIELD_NUMBER: _ClassVar[int]
    WATERMARKS_FIELD_NUMBER: _ClassVar[int]
    DOUBTED_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    COUNTERSIGN_FIELD_NUMBER: _ClassVar[int]
    term: int
    read_sequence: int
    client_address: str
    transfer_target: str
    readmit_boot_id: int
    readmit_index: int
    founded: bool
    watermarks: _containers.RepeatedCompositeFieldContainer[Watermark]
    doubted_boot_id: int
    countersign: int
    def __init__(self, term: _Optional[int] = ..., read_sequence: _Optional[int] = ..., client_address: _Optional[str] = ..., transfer_target: _Optional[str] = ..., readmit_boot_id: _Optional[int] = ..., readmit_index: _Optional[int] = ..., founded: _Optional[bool] = ..., watermarks: _Optional[_Iterable[_Union[Watermark, _Mapping]]] = ..., doubted_boot_id: _Optional[int] = ..., countersign: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("term", "read_sequence", "disk_full", "client_address", "standing", "boot_id", "uid", "removed_at")
    TERM_FIELD_NUMBER: _ClassVar[int]
    READ_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DISK_FULL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    REMOVED_AT_FIELD_NUMBER: _ClassVar[int]
    term: int
    read_sequence: int
    disk_full: bool
    client_address: str
    standing: int
    boot_id: int
    uid: int
    removed_at: int
    def __init__(self, term: _Optional[int] = ..., read_sequence: _Optional[int] = ..., disk_full: _Optional[bool] = ..., client_address: _Optional[str] = ..., standing: _Optional[int] = ..., boot_id: _Optional[int] = ..., uid: _Optional[int] = ..., removed_at: _Optional[int] = ...) -> None: ...

class Heartbeats(_message.Message):
    __slots__ = ("heartbeats",)
    HEARTBEATS_FIELD_NUMBER: _ClassVar[int]
    heartbeats: _containers.RepeatedCompositeFieldContainer[GroupHeartbeat]
    def __init__(self, heartbeats: _Optional[_Iterable[_Union[GroupHeartbeat, _Mapping]]] = ...) -> None: ...

class GroupHeartbeat(_message.Message):
    __slots__ = ("group", "sender", "repeats", "read_sequence")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    READ_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    group: str
    sender: str
    repeats: int
    read_sequence: int
    def __init__(self, group: _Optional[str] = ..., sender: _Optional[str] = ..., repeats: _Optional[int] = ..., read_sequence: _Optional[int] = ...) -> None: ...

class HeartbeatsAnswer(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[GroupHeartbeatAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[GroupHeartbeatAnswer, _Mapping]]] = ...) -> None: ...

class GroupHeartbeatAnswer(_message.Message):
    __slots__ = ("answer",)
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    answer: HeartbeatResponse
    def __init__(self, answer: _Optional[_Union[HeartbeatResponse, _Mapping]] = ...) -> None: ...

class TakeLeadershipRequest(_message.Message):
    __slots__ = ("term",)
    TERM_FIELD_NUMBER: _ClassVar[int]
    term: int
    def __init__(self, term: _Optional[int] = ...) -> None: ...

class Install(_message.Message):
    __slots__ = ("before_begin", "chain_crc", "position")
    BEFORE_BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHAIN_CRC_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    before_begin: EntryId
    chain_crc: int
    position: int
    def __init__(self, before_begin: _Optional[_Union[EntryId, _Mapping]] = ..., chain_crc: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("header", "protocol_version", "purpose", "members", "segment_bytes", "max_entry_bytes", "client_address", "base_log")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_ENTRY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BASE_LOG_FIELD_NUMBER: _ClassVar[int]
    header: Header
    protocol_version: int
    purpose: int
    members: _containers.RepeatedScalarFieldContainer[str]
    segment_bytes: int
    max_entry_bytes: int
    client_address: str
    base_log: BaseLog
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., protocol_version: _Optional[int] = ..., purpose: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ..., segment_bytes: _Optional[int] = ..., max_entry_bytes: _Optional[int] = ..., client_address: _Optional[str] = ..., base_log: _Optional[_Union[BaseLog, _Mapping]] = ...) -> None: ...

class BaseLog(_message.Message):
    __slots__ = ("begin", "end", "file_bytes", "digests", "kept_from")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FROM_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    file_bytes: int
    digests: _containers.RepeatedScalarFieldContainer[int]
    kept_from: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ..., file_bytes: _Optional[int] = ..., digests: _Optional[_Iterable[int]] = ..., kept_from: _Optional[int] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("code", "reason", "protocol_version", "client_address", "configuration")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    protocol_version: int
    client_address: str
    configuration: bytes
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., protocol_version: _Optional[int] = ..., client_address: _Optional[str] = ..., configuration: _Optional[bytes] = ...) -> None: ...

class ReadLogRequest(_message.Message):
    __slots__ = ("position", "length")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    position: int
    length: int
    def __init__(self, position: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class ReadLogResponse(_message.Message):
    __slots__ = ("held", "data")
    HELD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    held: bool
    data: bytes
    def __init__(self, held: _Optional[bool] = ..., data: _Optional[bytes] = ...) -> None: ...

class ChainCrcsRequest(_message.Message):
    __slots__ = ("indexes",)
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, indexes: _Optional[_Iterable[int]] = ...) -> None: ...

class ChainCrcsResponse(_message.Message):
    __slots__ = ("crcs",)
    CRCS_FIELD_NUMBER: _ClassVar[int]
    crcs: _containers.RepeatedCompositeFieldContainer[ChainCrc]
    def __init__(self, crcs: _Optional[_Iterable[_Union[ChainCrc, _Mapping]]] = ...) -> None: ...

class ChainCrc(_message.Message):
    __slots__ = ("index", "chain_crc")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CHAIN_CRC_FIELD_NUMBER: _ClassVar[int]
    index: int
    chain_crc: int
    def __init__(self, index: _Optional[int] = ..., chain_crc: _Optional[int] = ...) -> None: ...

class FetchSnapshotRequest(_message.Message):
    __slots__ = ("at_least", "index", "doubted")
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DOUBTED_FIELD_NUMBER: _ClassVar[int]
    at_least: int
    index: int
    doubted: int
    def __init__(self, at_least: _Optional[int] = ..., index: _Optional[int] = ..., doubted: _Optional[int] = ...) -> None: ...

class FetchSnapshotResponse(_message.Message):
    __slots__ = ("meta",)
    META_FIELD_NUMBER: _ClassVar[int]
    meta: bytes
    def __init__(self, meta: _Optional[bytes] = ...) -> None: ...

class SnapshotPieceRequest(_message.Message):
    __slots__ = ("file", "offset")
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    file: str
    offset: int
    def __init__(self, file: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class SnapshotPieceResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
