"""Every setting of a node, its default, its limits and its relations to the others.

Pure: it reads no file, no environment and no clock. ``ServerConfig`` is one frozen record; ``problems()`` names all
that is wrong with it at once. Reading conf files and the environment is ``dledger.settings``'s business.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

from dledger.errors import ConfigError
from dledger.layout import ENTRY_HEADER_BYTES, INDEX_UNIT_BYTES, MIN_BLANK_BYTES
from dledger.limits import Bytes, BytesOrZero, Millis, Percent, Port, Positive, Range, Unit, out_of_range
from dledger.types import NodeId
from dledger.values import address_text, host_of, parse_address, split, without_brackets

MIB: Final = 1 << 20
CLIENT_PORT_OFFSET: Final = 10_000
_DEFAULT_NODE: Final = NodeId("n0")


class FlushMode(StrEnum):
    """When an entry counts as stored: after its flush (group commit), or once it is in the page cache (as RocketMQ)."""

    SYNC = "sync"
    ASYNC = "async"


@dataclass(frozen=True, slots=True)
class Member:
    """One configured member: its id and the address (host, port) where its peers reach it."""

    node_id: NodeId
    host: str
    port: int

    @property
    def address(self) -> str:
        """``host:port``, with brackets around an IPv6 host."""
        return address_text(self.host, self.port)


@dataclass(frozen=True, slots=True)
class ElectionConfig:
    """Timers of the elector, in milliseconds."""

    heartbeat_interval_ms: Millis = 100
    """How often a leader tells the others that it lives."""
    election_timeout_ms_min: Millis = 500
    """Shortest silence after which a follower seeks leadership; within it nobody helps to depose a leader."""
    election_timeout_ms_max: Millis = 1000
    """Longest such silence, drawn anew each time; a leader that no quorum answers for so long steps down."""
    transfer_timeout_ms: Millis = 1000
    """How long a hand-over of leadership may take before the old leader goes on."""
    transfer_max_lag_entries: int = 1000
    """A member that lags further behind is not handed leadership."""
    preferred_leaders: tuple[NodeId, ...] = ()
    """Members to which any other leader hands over as soon as they have caught up."""
    preferred_check_interval_ms: Millis = 1000
    """How often a leader looks whether a preferred one, or one with room on its disk, should lead instead."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, as sentences."""
        found = out_of_range(self)
        if self.election_timeout_ms_min < 3 * self.heartbeat_interval_ms:
            found.append(
                f"election_timeout_ms_min={self.election_timeout_ms_min} must be at least three times "
                f"heartbeat_interval_ms={self.heartbeat_interval_ms}, or one lost heartbeat starts an election"
            )
        if self.election_timeout_ms_max <= self.election_timeout_ms_min:
            found.append(
                f"election_timeout_ms_max={self.election_timeout_ms_max} must exceed "
                f"election_timeout_ms_min={self.election_timeout_ms_min}, or candidates may split the vote forever"
            )
        return found


@dataclass(frozen=True, slots=True)
class ReplicationConfig:
    """Limits of the entry pusher."""

    push_bytes_max: Bytes = MIB
    """Bytes of log in one push; a push always carries at least one entry."""
    inflight_pushes_max: Positive = 16
    """Pushes on their way to one follower: with ``push_bytes_max`` the limit of what a slow one can hold up."""
    push_timeout_ms: Millis = 1000
    """How long a push may stay unanswered before the dispatcher compares again."""
    retry_interval_ms: Millis = 100
    """Pause before an unreachable or refusing follower is tried again."""
    commit_push_delay_ms: Millis = 5
    """How long an idle leader waits for an append to carry the commit index before it sends one alone."""
    handler_queue_pushes_max: Positive = 256
    """Pushes that a follower queues; beyond it they are refused, and the leader compares again."""
    pending_entries_max: Positive = 10_000
    """Entries that may wait for a quorum on the leader; beyond it appends are refused (``PendingFullError``)."""
    pending_bytes_max: Bytes = 64 * MIB
    """Bytes of them."""
    ack_timeout_ms: Millis = 2500
    """How long an append or a linearizable read waits for a quorum; then an append's outcome is unknown."""
    noop_body: bytes = b""
    """Body of the entry with which a leader begins its term; a broker gives its own."""
    noop_compatible: bool = False
    """Write NOOPs that Java readers before 0.4 take for ordinary entries, as ``noop_body`` must be; a broker does."""
    max_producers: Annotated[int, Range(1, 65_536)] = 4096
    """Producers whose repeated appends a leader knows; a further one takes the place of one idle for 10 minutes."""
    producer_expiry_ms: Millis = 7 * 24 * 3_600_000
    """How long an idle producer is remembered at least; then it must begin under a new name."""
    producer_snapshot_entries: Annotated[int, Range(1, 131_072)] = 16_384
    """After so many entries (32 for each producer, if that is more) a leader writes down what it knows of producers."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, as sentences."""
        found = out_of_range(self)
        if self.noop_compatible and not self.noop_body:
            found.append("noop_compatible requires a noop_body that readers of the log accept as an ordinary entry")
        if self.handler_queue_pushes_max < self.inflight_pushes_max:
            found.append(
                f"handler_queue_pushes_max={self.handler_queue_pushes_max} must be at least "
                f"inflight_pushes_max={self.inflight_pushes_max}, or followers would refuse pushes that their leader "
                "may send"
            )
        return found


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where and how entries are kept.

    ``base_dir`` holds ``dledger-<node id>/``. ``data_dirs``, when given, replace its ``data`` directory by several
    paths over which segments are spread; ``read_only_data_dirs`` are read but never written to.
    """

    base_dir: Path = Path("dledger-store")
    """Holds ``dledger-<node id>/``, all that the node keeps."""
    data_dirs: tuple[Path, ...] = ()
    """Directories over which segments are spread, instead of ``data`` in the node's own."""
    read_only_data_dirs: tuple[Path, ...] = ()
    """Directories whose segments are read but never written to or removed."""
    segment_bytes: Annotated[int, Range(ENTRY_HEADER_BYTES + MIN_BLANK_BYTES + 1), Unit.BYTES] = 1024 * MIB
    """Size of a segment file; the same on all members, and for the life of a log."""
    index_segment_bytes: Annotated[int, Range(INDEX_UNIT_BYTES, multiple_of=INDEX_UNIT_BYTES), Unit.BYTES] = 160 * MIB
    """Size of an index file; for the life of a log."""
    max_entry_bytes: Bytes = 4 * MIB
    """Largest record, its 48 byte header included."""
    flush_mode: FlushMode = FlushMode.SYNC
    """When an entry counts as stored: after its flush, or once it is in the page cache (a power cut can lose it)."""
    flush_interval_ms: Millis = 10
    """Flush period of ``flush_mode=async`` while appends come; ``sync`` flushes as soon as something waits."""
    checkpoint_interval_ms: Millis = 100
    """How old the durable flushed mark may become."""
    warm_bytes: BytesOrZero = 16 * MIB
    """How far ahead of the end the segment is pre-touched."""
    recovery_verify_bytes: BytesOrZero = 64 * MIB
    """How many bytes below the durable mark are verified again at start."""
    import_unchecked: bool = False
    """Open a log whose CRC fields are 0, as the Java line writes them."""
    retention_hours: Annotated[float, Range(0), Unit.HOURS] = 72
    """Age (since its last write) from which a segment may be removed."""
    delete_hour: Annotated[tuple[int, ...], Range(0, 23)] = (4,)
    """Local hours of the day in which expired segments are removed."""
    disk_check_ratio: Annotated[float, Range(above=0, high=1)] = 0.70
    """Usage above which expired segments are removed at any hour."""
    disk_clean_ratio: Annotated[float, Range(above=0, high=1)] = 0.85
    """Usage above which unexpired segments are removed too, if ``force_clean``."""
    disk_full_ratio: Annotated[float, Range(above=0, high=1)] = 0.90
    """Usage above which appends are refused with ``DISK_FULL``."""
    force_clean: bool = True
    """Whether a disk above ``disk_clean_ratio`` costs the oldest segments, expired or not."""
    clean_interval_ms: Millis = 1000
    """How often the disk is measured and expired segments are looked for."""
    follower_keep_bytes: BytesOrZero = 16 * 1024 * MIB
    """How many bytes of log are kept, beyond retention, for a live follower that still needs them."""
    scrub_bytes_per_s: BytesOrZero = MIB
    """How fast a running node verifies its whole log again and again, in the background; 0: not at all."""
    auto_repair: bool = True
    """Whether a member of a group fetches damaged or missing segments from its peers by itself."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, as sentences."""
        found = out_of_range(self)
        if not self.disk_check_ratio <= self.disk_clean_ratio <= self.disk_full_ratio:
            found.append(
                f"disk ratios must satisfy disk_check_ratio={self.disk_check_ratio} <= "
                f"disk_clean_ratio={self.disk_clean_ratio} <= disk_full_ratio={self.disk_full_ratio}"
            )
        return found

    @property
    def entry_bytes_limit(self) -> int:
        """The largest record that can be stored: the configured maximum, or what one segment can hold."""
        return min(self.max_entry_bytes, self.segment_bytes - MIN_BLANK_BYTES)


class ClientAuth(StrEnum):
    """Whether a client must show a certificate."""

    REQUIRE = "require"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """How a server protects what is said to it. With TLS it speaks nothing else, to peers and clients alike.

    The three main paths are given together. The files may be replaced at any time: new connections use the new ones.
    """

    tls_cert_path: Path | None = None
    """PEM file of this node's certificate, and of those between it and the CA's. Its subjectAltName holds the node id
    and the host names and addresses that clients use."""
    tls_key_path: Path | None = None
    """PEM file of the certificate's key, not encrypted."""
    tls_trust_cert_path: Path | None = None
    """PEM file of the CAs whose certificates peers must show."""
    tls_client_trust_cert_path: Path | None = None
    """PEM file of the CAs whose certificates clients must show; unset: the same as for peers."""
    tls_client_auth: ClientAuth = ClientAuth.REQUIRE
    """Whether clients must show a certificate (``require``) or not (``none``); peers always must."""
    insecure: bool = False
    """Serve plaintext to other machines. Without it and without TLS, only loopback addresses are taken."""

    @property
    def has_tls(self) -> bool:
        """Whether TLS is wanted, as far as the settings go."""
        return any(path is not None for _, path in self._paths())

    def problems(self, addresses: Iterable[str]) -> list[str]:
        """Everything wrong with these values, as sentences. ``addresses``: what is listened on or connected to."""
        if self.has_tls or self.tls_client_trust_cert_path is not None:
            missing = [name for name, path in self._paths() if path is None]
            return (
                [f"TLS requires a certificate, its key and the CA: also set {' and '.join(missing)}"] if missing else []
            )
        if self.insecure:
            return []
        return plaintext_problems(
            addresses, "set tls_cert_path, tls_key_path and tls_trust_cert_path", "set insecure=true"
        )

    def _paths(self) -> tuple[tuple[str, Path | None], ...]:
        return (
            ("tls_cert_path", self.tls_cert_path),
            ("tls_key_path", self.tls_key_path),
            ("tls_trust_cert_path", self.tls_trust_cert_path),
        )


def plaintext_problems(addresses: Iterable[str], use_tls: str, insist: str) -> list[str]:
    """What is wrong with plaintext at these addresses (``host:port`` or hosts): nothing if all are of this machine."""
    remote = [one for one in dict.fromkeys(addresses) if not is_loopback(one)]
    if not remote:
        return []
    return [
        f"plaintext is for loopback addresses, and {', '.join(remote)} {'is' if len(remote) == 1 else 'are'} "
        f"not: {use_tls} (`dledger certs` creates the files), or {insist} to accept the risk"
    ]


def is_loopback(address: str) -> bool:
    """Whether a host, or the host of ``host:port``, is certainly this machine and seen from nowhere else.

    Of names only ``localhost``: what ends with ``.localhost`` many machines ask a name server for.
    """
    kind, _, path = address.partition(":")
    if kind in ("unix", "unix-abstract") and path:
        return not path.isdigit()  # else a host of that name
    has_port = address.count(":") == 1 or (address.startswith("[") and not address.endswith("]"))
    host = host_of(address) if has_port else without_brackets(address)
    if host.removesuffix(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """Who may do what: nothing is asked unless ``acl_enable``."""

    acl_enable: bool = False
    """Whether clients need an access key and the permission for what they do; everything else is denied then."""
    acl_file: Path | None = None
    """Accounts and permissions, as RocketMQ's ``plain_acl.yml``; read again when it changes, refused if others may."""
    account_share_percent: Percent = 75
    """How much of what clients can have on a server (entries, bytes, pulls, streams, answers) one account may have.

    Where access control is off, one address; it may also have no more than this part of the connections.
    """

    def problems(self) -> list[str]:
        """Everything wrong with these values, as sentences."""
        found = out_of_range(self)
        if self.acl_enable and self.acl_file is None:
            found.append(
                "acl_enable=true requires acl_file, the file of accounts (`dledger access new NAME` creates one)"
            )
        return found


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What clients may take up of a server that they connect to."""

    connections_max: Annotated[int, Range(1, 1_000_000)] = 1024
    """Connections of clients; of more, those of the address with the most are hung up on, idle ones first."""
    connection_calls_max: Annotated[int, Range(1, 1_000_000)] = 128
    """Calls and streams at once on one connection; more wait at the client. Each may hold an incomplete request in
    memory, so this, times the largest request, is what one connection may take. Consumers have a stream per queue, and
    our clients open further connections for more than 64.
    """
    connection_idle_ms_max: Annotated[int, Range(1_000, 86_400_000), Unit.MS] = 600_000
    """How long a connection without a call is kept."""
    handshake_ms_max: Annotated[int, Range(100, 120_000), Unit.MS] = 5_000
    """How long a new connection may take to say (TLS and) HTTP/2."""
    header_bytes_max: Annotated[int, Range(1_024, MIB), Unit.BYTES] = 16 * 1024
    """Metadata of one call."""
    call_ms_max: Annotated[int, Range(100, 3_600_000), Unit.MS] = 30_000
    """Longest call that is no stream, also without a deadline of the client's; a pull may take its wait longer.

    A client that takes nothing of its answers for so long is hung up on.
    """
    answer_bytes_max: Annotated[int, Range(MIB, 1 << 40), Unit.BYTES] = 256 * MIB
    """Bytes of answers that clients have not taken yet; further reads of the log and pulls wait for room."""
    ping_interval_ms_min: Annotated[int, Range(100, 3_600_000), Unit.MS] = 5_000
    """Clients that ping more often without a call are hung up on."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, as sentences."""
        return out_of_range(self)


@dataclass(frozen=True, slots=True)
class BulkReadConfig:
    """What readers of large ranges (Spark jobs, audits) may take up of a node."""

    bulk_streams_max: Annotated[int, Range(1, 10_000)] = 16
    """Large reads of the log (raw chunks, block digests) at once; more are refused, and tried again elsewhere."""
    bulk_stream_ms_max: Annotated[int, Range(1_000, 86_400_000), Unit.MS] = 600_000
    """Longest such read; clients go on where it ended. One chunk may take ``call_ms_max`` until the client takes it."""
    # One piece of work must fit into a second, or readers that take turns would wait too long to be told apart from
    # those that get nothing.
    fetch_rate_bytes_max: Annotated[int, Range(MIB, or_zero=True), Unit.BYTES] = 0
    """Bytes of log per second that are given raw, to all who ask together; 0: as fast as they take them."""
    digest_rate_bytes_max: Annotated[int, Range(16 * MIB, or_zero=True), Unit.BYTES] = 1024 * MIB
    """Bytes of log per second of which digests are computed, for all who ask together; 0: no limit."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, as sentences."""
        return out_of_range(self)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything one node needs to run. Build it, then ``check()`` it before anything is opened."""

    group: str = "default"
    """Name of the group; the same on all members, kept on the disk."""
    node_id: NodeId = _DEFAULT_NODE
    """This node's id, one of the members'; kept on the disk."""
    members: tuple[Member, ...] = (Member(_DEFAULT_NODE, "127.0.0.1", 20911),)
    """All members, this one included: ``id-host:port;id-host:port``, with the hosts and ports for peers."""
    bind_host: str = ""
    """Address to listen on, for members and for clients; empty: the host of this node in ``members``.

    ``0.0.0.0`` in a container, whose address on a network is not its own choice and may change.
    """
    client_host: str = ""
    """Address to listen on for clients; empty: ``bind_host``, or the host of this node in ``members``."""
    client_port: Annotated[int | None, Range(0, 65535)] = None
    """Port for clients; not given: the peer port + 10000; 0: any free port."""
    advertised_client_address: str = ""
    """What nodes tell clients to connect to; empty: the client port, at ``client_host`` or the host in ``members``."""
    cluster_id: str = ""
    """Same on all members; empty: derived from the group's name and member ids."""
    election: ElectionConfig = field(default_factory=ElectionConfig)
    replication: ReplicationConfig = field(default_factory=ReplicationConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    bulk: BulkReadConfig = field(default_factory=BulkReadConfig)
    client_streams_max: Positive = 1024
    """Streams of each kind (append, follow, watch; health and reflection) that clients may have open on this node."""
    client_appends: bool = True
    """Whether the log service takes appends; a broker sets it to false, because its log is its own."""
    metrics_port: Port = 0
    """Port on which Prometheus finds ``/metrics``, beside ``/healthz`` and ``/readyz``; 0: none."""
    metrics_host: str = "127.0.0.1"
    """Address to serve metrics at. They are read-only and not encrypted, for anybody who can connect."""

    @property
    def self_member(self) -> Member:
        """This node's own entry in ``members``. Raises ``ConfigError`` if there is none."""
        for member in self.members:
            if member.node_id == self.node_id:
                return member
        raise ConfigError([self._missing_self()])

    @property
    def client_bind_host(self) -> str:
        """The host to listen on for clients."""
        return self.client_host or self.bind_host or self.self_member.host

    @property
    def peers(self) -> tuple[Member, ...]:
        """The other members, sorted by id."""
        others = (member for member in self.members if member.node_id != self.node_id)
        return tuple(sorted(others, key=lambda member: member.node_id))

    @property
    def effective_cluster_id(self) -> str:
        """The configured cluster id, or one that all members derive alike."""
        return self.cluster_id or f"{self.group}/{','.join(sorted(m.node_id for m in self.members))}"

    def _missing_self(self) -> str:
        ids = ", ".join(member.node_id for member in self.members)
        return f"node id {self.node_id!r} is not among the members ({ids}): set the id to one of them"

    def problems(self) -> list[str]:
        """Everything wrong with this configuration, as sentences; empty when it is sound."""
        found = out_of_range(self)
        ids = [member.node_id for member in self.members]
        if not self.group:
            found.append("group must not be empty")
        if self.node_id not in ids:
            found.append(self._missing_self())
        found += [f"member id {one!r} appears more than once" for one in sorted({i for i in ids if ids.count(i) > 1})]
        found += [f"member id {one!r} must not contain a slash" for one in sorted(set(ids)) if "/" in one]
        addresses = [member.address for member in self.members]
        found += [
            f"member address {one!r} appears more than once"
            for one in sorted({a for a in addresses if addresses.count(a) > 1})
        ]
        found += [
            f"preferred leader {one!r} is not a member" for one in self.election.preferred_leaders if one not in ids
        ]
        if self.node_id in ids and self.client_port is None and self.self_member.port + CLIENT_PORT_OFFSET > 65535:
            found.append(
                f"peer port {self.self_member.port} + {CLIENT_PORT_OFFSET} is not a valid port: set client_port "
                "explicitly"
            )
        found += self.election.problems() + self.replication.problems() + self.store.problems()
        found += self.access.problems() + self.limits.problems() + self.bulk.problems()
        found += self.security.problems([*addresses, *filter(None, (self.bind_host, self.client_host))])
        return found

    def check(self) -> ServerConfig:
        """Return self, or raise ``ConfigError`` naming every problem."""
        found = self.problems()
        if found:
            raise ConfigError(found)
        return self


def parse_members(text: str) -> tuple[Member, ...]:
    """Read RocketMQ's ``dLegerPeers``: ``id-host:port;id-host:port``.

    The id ends at the first ``-`` (so hosts may hold more of them), the port starts after the last ``:`` (so an IPv6
    host works, in brackets or bare). Raises ``ConfigError`` naming every part that does not fit.
    """
    members: list[Member] = []
    problems: list[str] = []
    for part in split(text, ";"):
        node_id, _, address = part.partition("-")
        try:
            host, port = parse_address(address)
        except ValueError:
            host, port = "", 0
        if node_id and host:
            members.append(Member(NodeId(node_id), host, port))
        else:
            problems.append(f"member {part!r} must have the form id-host:port, for example n0-127.0.0.1:20911")
    if not members and not problems:
        problems.append("no members given: use id-host:port;id-host:port")
    if problems:
        raise ConfigError(problems)
    return tuple(members)
