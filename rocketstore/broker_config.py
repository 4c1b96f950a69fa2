"""Every setting of a broker: defaults, limits and relations. Pure: it reads no files.

``rocketstore.settings`` reads conf files, the environment and flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from dledger.config import (
    AccessConfig,
    ConnectionLimits,
    SecurityConfig,
    ServerConfig,
    grpc_port_of,
    grpc_port_problems,
)
from dledger.errors import ConfigError
from dledger.types import TlsServerMode
from dledger.values import (
    Bytes,
    Millis,
    Port,
    Positive,
    Range,
    Unit,
    address_text,
    is_loopback,
    out_of_range,
    parse_address,
    parse_addresses,
)
from rocketstore.config import MIB, MessageStoreConfig
from rocketstore.message.message import DelayLevels
from rocketstore.types import BrokerRole

VIP_PORT_OFFSET: Final = -2
"""From ``listenPort`` to RocketMQ's second port (VIP channel)."""
HA_PORT_OFFSET: Final = 1
"""From ``listenPort`` to the port of classic replication, unless it is configured."""
PERMISSION_READ: Final = 4
PERMISSION_WRITE: Final = 2

GET_LIMITS: Final[dict[str, Any]] = {  # Any: for keyword arguments
    "max_transfer_count_on_message_in_memory": 4096,
    "max_transfer_bytes_on_message_in_memory": MIB,
    "max_transfer_count_on_message_in_disk": 4096,
    "max_transfer_bytes_on_message_in_disk": MIB,
}
"""RocketMQ's defaults (32 messages or 256 KiB, from disk 8 or 64 KiB) suit clients that pull without pauses."""


def _broker_store() -> MessageStoreConfig:
    """The message store's defaults, except the size of one get, whose response replaces many of RocketMQ's."""
    return MessageStoreConfig(**GET_LIMITS)


_NAMESRV_TLS_PATHS: Final = ("namesrv_tls_trust_cert_path", "namesrv_tls_cert_path", "namesrv_tls_key_path")


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Everything one broker needs to run. ``dledger`` is None for a plain broker: one process, one directory."""

    store: MessageStoreConfig = field(default_factory=_broker_store)
    dledger: ServerConfig | None = None
    access: AccessConfig = field(default_factory=AccessConfig)
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    """For a plain broker; a DLedger broker uses its node's."""
    cluster_name: str = "DefaultCluster"
    """For display; the same on all brokers of a cluster."""
    broker_name: str = ""
    """Empty: the DLedger group's name, or ``broker-a``."""
    broker_id: Annotated[int, Range(0)] = 0
    """0: a master; a plain broker's slaves have numbers from 1 on. In a DLedger broker the role decides: the leader has
    0, as followers n0 to n2 have 1 to 3.
    """
    listen_port: Port = 10911
    """Port for clients, of RocketMQ's remoting protocol; 0: any free port (plain broker only)."""
    grpc_server_port: Annotated[int | None, Range(0, 65535)] = None
    """Port for gRPC: RocketMQ 5's clients, health, reflection, and the log service of a member of a group; 0: none.
    Unset: ``listen_port`` + 2.
    """
    grpc_clients_max: Positive = 10_000
    """Maximum of RocketMQ 5's clients that are connected at once."""
    grpc_tls_mode: TlsServerMode | None = None
    """Whether gRPC's clients use TLS: ``enforcing`` (they must; the default with certificates), ``permissive`` (they
    may; others send plaintext over the network; the default with ``grpc_self_signed``), ``disabled`` (they must not).
    """
    grpc_self_signed: bool = False
    """Without certificates: accept TLS at gRPC's port with a certificate that is made at the start. RocketMQ's clients
    for Java, Go, C# and C++ use TLS unless told otherwise, and believe any certificate, so it protects from who listens
    on the network, and from nobody else.
    """
    grpc_connection_calls_max: Positive = 1024
    """Maximum concurrent calls and streams per connection of gRPC, instead of ``connection_calls_max``: RocketMQ 5's
    consumers have one that waits for each queue. Further ones wait at the client.
    """
    grpc_empty_bodies: bool = False
    """Whether RocketMQ 5's clients may send messages without a body, which RocketMQ refuses by default."""
    vip_port: Annotated[int | None, Range(0, 65535)] = None
    """Second port of the same kind as ``listen_port``, which RocketMQ's brokers have for some clients and for slaves;
    0: none. Unset: ``listen_port`` - 2, and if that port is taken, the broker does without.
    """
    tls_server_mode: TlsServerMode | None = None
    """Whether remoting clients use TLS if certificates are configured: ``enforcing`` (they must, like gRPC clients; the
    default), ``permissive`` (they may; others send plaintext over the network), ``disabled`` (they must not).
    """
    listen_host: str = ""
    """Address to listen on for clients; empty: in a DLedger broker, ``bind_host`` or the member's host; in a plain one,
    all addresses if other machines can reach ``broker_ip1``, otherwise loopback.
    """
    broker_ip1: str = ""
    """Host that clients and other brokers should connect to; empty: the one listened on."""
    namesrv_addr: str = ""
    """Name servers to register with, RocketMQ's or ours: ``host:port`` separated by semicolons; empty: none. Unset: as
    RocketMQ's variable ``NAMESRV_ADDR`` says.
    """
    namesrv_tls: bool = False
    """Whether to connect to the name servers with TLS. Their certificates are always verified, names included."""
    namesrv_tls_trust_cert_path: Path | None = None
    """PEM file with the CAs that must have signed their certificates; unset: ``tls_trust_cert_path``."""
    namesrv_tls_cert_path: Path | None = None
    """PEM file with the certificate to show them; unset: ``tls_cert_path``, if that is set."""
    namesrv_tls_key_path: Path | None = None
    """PEM file with its private key, unencrypted."""
    register_name_server_period: Annotated[int, Range(10_000, 60_000), Unit.MS] = 30_000
    """How often to register with them; besides, it is done at once when the role or a topic changes."""
    register_broker_timeout_mills: Annotated[int, Range(100, 60_000), Unit.MS] = 6_000
    """How long a name server may take to answer a registration."""
    broker_permission: Annotated[int, Range(0, 7)] = PERMISSION_READ | PERMISSION_WRITE
    """The permission of topics that set none: the sum of 4 (read) and 2 (write)."""
    auto_create_topic_enable: bool = True
    """Whether sending to a topic that does not exist creates it."""
    auto_create_subscription_group: bool = True
    """Whether RocketMQ's consumers may use a group that does not exist, which creates it; our own always may."""
    default_topic_queue_nums: Positive = 8
    """Number of queues for a topic that does not set its own."""
    queues_max: Positive = 16_384
    """Maximum queues of all topics together; topics created by sends may have nine tenths of them."""
    groups_max: Positive = 10_000
    """Maximum consumer groups with offsets."""
    offsets_max: Positive = 500_000
    """Maximum offsets (one per group and queue) of all groups together."""
    pull_wait_ms_max: Millis = 60_000
    """Longest wait of a pull."""
    pull_bytes_max: Bytes = 4 * MIB
    """Maximum bytes of records per answer, except that a single larger record is always returned."""
    enable_property_filter: bool = True
    """Whether consumers may filter messages by their properties, with SQL92 expressions; false: they are refused."""
    pulls_waiting_max: Positive = 20_000
    """Maximum pulls waiting for messages."""
    streams_max: Positive = 1024
    """Maximum open streams of health and reflection at a plain broker's port of gRPC."""
    send_pending_messages_max: Positive = 40_000
    """Maximum messages of all producers waiting to be stored; beyond it, streams pause and single sends are refused."""
    send_pending_bytes_max: Bytes = 48 * MIB
    """Maximum bytes of messages of all producers waiting to be stored."""
    read_threads: Positive = 4
    """Number of threads that read messages for pulls and queries."""
    slave_read_enable: bool = False
    """Whether consumers of RocketMQ's clients that read what is no longer in memory (see
    ``access_message_in_memory_max_ratio``) are sent to a slave, and back: which, is a setting of their group
    (``whichBrokerWhenConsumeSlowly``, ``brokerId``). Slaves answer anyone who asks them, in either case.
    """
    reject_transaction_message: bool = False
    """Whether transactional messages are refused."""
    transaction_check_interval: Annotated[int, Range(100, 86_400_000), Unit.MS] = 60_000
    """How often the producers of open transactions are asked."""
    transaction_time_out: Annotated[int, Range(0, 86_400_000), Unit.MS] = 6_000
    """For how long after it was prepared nobody asks about a transaction; a message may say otherwise."""
    transaction_check_max: Annotated[int, Range(1, 1000)] = 15
    """After how many checks without a result a transaction is given up: its message is kept in
    ``TRANS_CHECK_MAX_TIME_TOPIC``.
    """
    transactions_open_max: Positive = 100_000
    """Maximum transactions neither committed nor rolled back; one producer group may have ``account_share_percent`` of
    them.
    """
    timer_max_delay_sec: Annotated[int, Range(1, 3_456_000)] = 3_456_000
    """How far ahead (seconds) a message's time of delivery may be. RocketMQ's default is 3 days. Here it is 40 days,
    which is the most: what waits for longer than half of ``file_reserved_time`` is stored again, and does not expire.
    """
    timed_messages_max: Positive = 10_000_000
    """Maximum messages that wait for a time of their own (``account_share_percent`` of them of one account or address),
    """
    timed_messages_per_s_max: Positive = 500_000
    """and of those for the same second."""
    timed_bytes_per_s_max: Bytes = 10 * MIB
    """How fast messages that are due are stored in their topics, so that they leave room for those being sent."""
    metrics_port: Port = 0
    """Port that serves ``/metrics`` for Prometheus, ``/healthz`` and ``/readyz``; 0: none."""
    metrics_host: str = "127.0.0.1"
    """Address to serve metrics at: read-only, unencrypted, and open to anyone who can connect."""
    metrics_topics_max: Positive = 200
    """Maximum topics, and pairs of group and topic, with metrics of their own; all others are reported together."""

    @property
    def name(self) -> str:
        """The broker's name, which all members of a DLedger group share."""
        return self.broker_name or (self.dledger.group if self.dledger is not None else "broker-a")

    @property
    def name_servers(self) -> tuple[str, ...]:
        """Addresses of ``namesrv_addr``."""
        return parse_addresses(self.namesrv_addr) if self.namesrv_addr.strip() else ()

    @property
    def node_id(self) -> str:
        """Which of the brokers of that name this is."""
        return str(self.dledger.node_id) if self.dledger is not None else str(self.broker_id)

    @property
    def bind_host(self) -> str:
        """The host to listen on."""
        if self.listen_host:
            return self.listen_host
        if self.dledger is not None:
            return self.dledger.bind_host or self.dledger.self_member.host
        return "127.0.0.1" if not self.broker_ip1 or is_loopback(self.broker_ip1) else "0.0.0.0"

    @property
    def effective_security(self) -> SecurityConfig:
        """The security settings of the broker's port."""
        return self.security if self.dledger is None else self.dledger.security

    @property
    def effective_limits(self) -> ConnectionLimits:
        """How much of the broker its clients may use."""
        return self.limits if self.dledger is None else self.dledger.limits

    def address(self, port: int) -> str:
        """The address for clients, given the port it listens on."""
        host = self.broker_ip1 or (self.dledger.self_member.host if self.dledger is not None else self.bind_host)
        return address_text(host, port)

    @property
    def namesrv_tls_files(self) -> tuple[Path | None, Path | None, Path | None]:
        """CA, certificate and key for TLS with name servers."""
        own = self.effective_security
        shown = self.namesrv_tls_cert_path, self.namesrv_tls_key_path
        if shown == (None, None):
            shown = own.tls_cert_path, own.tls_key_path
        return self.namesrv_tls_trust_cert_path or own.tls_trust_cert_path, *shown

    def _namesrv_tls_problems(self) -> list[str]:
        ca, cert, key = self.namesrv_tls_files
        if not self.namesrv_tls:
            unused = [name for name in _NAMESRV_TLS_PATHS if getattr(self, name) is not None]
            return [f"{' and '.join(unused)} need namesrv_tls=true"] if unused else []
        if ca is None:
            return ["namesrv_tls needs the CA of the name servers: also set namesrv_tls_trust_cert_path"]
        if (cert is None) != (key is None):
            return ["namesrv_tls_cert_path and namesrv_tls_key_path must be set together"]
        return []

    def problems(self) -> list[str]:
        """All problems of this configuration, as sentences; empty if it is valid."""
        found = out_of_range(self.store) + out_of_range(self) + _delay_problems(self.store)
        found += self._further_port_problems()
        if self.tls_server_mode is TlsServerMode.ENFORCING and not self.effective_security.has_tls:
            found.append("tls_server_mode=enforcing requires a certificate: also set tls_cert_path and the others")
        if self.grpc_self_signed and self.effective_security.has_tls:
            found.append(
                "grpc_self_signed=true is for a broker without certificates: omit it, or tls_cert_path and the others"
            )
        if self.grpc_tls_mode in (TlsServerMode.ENFORCING, TlsServerMode.PERMISSIVE) and not (
            self.grpc_self_signed or self.effective_security.has_tls
        ):
            found.append(
                f"grpc_tls_mode={self.grpc_tls_mode} requires a certificate: also set tls_cert_path and the others, or "
                "grpc_self_signed=true"
            )
        try:
            _ = self.name_servers
        except ValueError as error:
            found.append(f"namesrv_addr: {error}")
        found += self._namesrv_tls_problems()
        if self.dledger is None:
            found += self.access.problems() + self.limits.problems()
            found += [f"{one}{self._why_everywhere()}" for one in self.security.problems([self.bind_host])]
            found += self._replication_problems()
        else:
            found += self.dledger.problems()
            if self.access != self.dledger.access:
                found.append("the broker and its log must have the same access settings")
            found += self._port_problems(self.dledger)
            found += self._listen_problems(self.dledger)
        return found

    def _replication_problems(self) -> list[str]:
        """Of classic replication between plain brokers."""
        store, found = self.store, []
        if store.broker_role is BrokerRole.SLAVE and self.broker_id < 1:
            found.append("broker_role=SLAVE requires a broker_id of 1 or more, which no other broker of its name has")
        if store.broker_role is not BrokerRole.SLAVE and self.broker_id:
            found.append(f"broker_id={self.broker_id} belongs to a slave: a master has 0, so set broker_role=SLAVE")
        if store.ha_master_address:
            try:
                parse_address(store.ha_master_address)
            except ValueError as error:
                found.append(f"ha_master_address: {error}")
        elif store.broker_role is BrokerRole.SLAVE and not self.namesrv_addr.strip():
            found.append("broker_role=SLAVE requires ha_master_address, or a namesrv_addr that knows the master")
        if store.min_in_sync_replicas > store.in_sync_replicas:
            found.append(
                f"min_in_sync_replicas={store.min_in_sync_replicas} is more than "
                f"in_sync_replicas={store.in_sync_replicas}, the number that puts wait for"
            )
        if store.ha_tls and not self.security.has_tls:
            found.append("ha_tls=true requires a certificate: also set tls_cert_path and the others")
        return found

    def _why_everywhere(self) -> str:
        """Why it listens on every address, if no address was configured."""
        if self.listen_host or not self.broker_ip1:
            return ""
        return (
            f". It listens on every address because broker_ip1={self.broker_ip1} is set: set listen_host to choose one"
        )

    def _listen_problems(self, dledger: ServerConfig) -> list[str]:
        """Plaintext for other machines, unless already reported for the node's own addresses."""
        told = [*(member.address for member in dledger.members), *filter(None, (dledger.bind_host,))]
        if not self.listen_host or dledger.security.problems(told):
            return []
        return dledger.security.problems([self.listen_host])

    def _further_port_problems(self) -> list[str]:
        others = {self.listen_port: "listen_port"} if self.listen_port else {}
        if self.dledger is not None and self.dledger.node_id in [one.node_id for one in self.dledger.members]:
            others[self.dledger.self_member.port] = f"the peer port of {self.dledger.node_id}"
        found = []
        if self.vip_port and self.vip_port in others:
            found.append(f"vip_port={self.vip_port} is also {others[self.vip_port]}: change one of them")
        elif self.vip_bind_port:
            others[self.vip_bind_port] = "vip_port"
        if self.dledger is None and self.listen_port:
            ha_port = self.store.ha_listen_port
            others[self.listen_port + HA_PORT_OFFSET if ha_port is None else ha_port] = "ha_listen_port"
        if self.metrics_port:
            others[self.metrics_port] = "metrics_port"
        return found + grpc_port_problems(self.grpc_bind_port, self.grpc_server_port, "listen_port", others)

    @property
    def vip_bind_port(self) -> int:
        """The VIP port to listen on; 0: none."""
        port = self.listen_port + VIP_PORT_OFFSET if self.vip_port is None else self.vip_port
        return max(0, port)

    @property
    def grpc_bind_port(self) -> int | None:
        """The port to listen on for gRPC; 0: any free port, None: none."""
        return grpc_port_of(self.grpc_server_port, self.listen_port)

    def _port_problems(self, dledger: ServerConfig) -> list[str]:
        if dledger.node_id not in [member.node_id for member in dledger.members]:
            return []  # already reported
        if self.listen_port == 0:
            return [
                "listen_port=0 works for plain brokers only: the members of a group announce their addresses to "
                "each other"
            ]
        peer_port = dledger.self_member.port
        if self.listen_port == peer_port:
            return [f"listen_port={self.listen_port} is also the peer port of {dledger.node_id}: change one of them"]
        return []


def _delay_problems(store: MessageStoreConfig) -> list[str]:
    try:
        DelayLevels.parse(store.message_delay_level)
    except ConfigError as error:
        return list(error.problems)
    return []
