"""The names of settings in RocketMQ's brokers and DLedger, and their names here."""

from __future__ import annotations

from typing import Final

ALIASES: Final = {
    # RocketMQ's broker.conf
    "dLegerGroup": "group",
    "dLegerSelfId": "node_id",
    "dLegerPeers": "members",
    "dLegerJoin": "join",  # RocketMQ has no such setting
    "listenPort": "client_port",
    "storePathRootDir": "base_dir",
    "storePathDLedgerCommitLog": "data_dirs",
    "readOnlyCommitLogStorePaths": "read_only_data_dirs",
    "mappedFileSizeCommitLog": "segment_bytes",
    "deleteWhen": "delete_hour",
    "fileReservedTime": "retention_hours",
    "cleanFileForciblyEnable": "force_clean",
    "flushDiskType": "flush_mode",
    "preferredLeaderId": "preferred_leaders",
    "preferredLeaderIds": "preferred_leaders",
    "aclEnable": "acl_enable",
    # RocketMQ's proxy
    "grpcServerPort": "grpc_server_port",
    # RocketMQ's tls.properties
    "tls.server.certPath": "tls_cert_path",
    "tls.server.keyPath": "tls_key_path",
    "tls.server.trustCertPath": "tls_trust_cert_path",
    "tls.server.need.client.auth": "tls_client_auth",
    "tls.server.authClient": "tls_client_auth",
    # DLedger's own configuration
    "selfId": "node_id",
    "peers": "members",
    "storeBaseDir": "base_dir",
    "dataStorePath": "data_dirs",
    "readOnlyDataStoreDirs": "read_only_data_dirs",
    "mappedFileSizeForEntryData": "segment_bytes",
    "mappedFileSizeForEntryIndex": "index_segment_bytes",
    "flushFileInterval": "flush_interval_ms",
    "checkPointInterval": "checkpoint_interval_ms",
    "fileReservedHours": "retention_hours",
    "diskSpaceRatioToCheckExpired": "disk_check_ratio",
    "diskSpaceRatioToForceClean": "disk_clean_ratio",
    "enableDiskForceClean": "force_clean",
    "maxPendingRequestsNum": "pending_entries_max",
    "maxWaitAckTimeMs": "ack_timeout_ms",
    "maxPushTimeOutMs": "push_timeout_ms",
    "heartBeatTimeIntervalMs": "heartbeat_interval_ms",
    "maxLeadershipTransferWaitIndex": "transfer_max_lag_entries",
    "leadershipTransferWaitTimeout": "transfer_timeout_ms",
    "checkTransferLeaderInterval": "preferred_check_interval_ms",
    "metricsPromExporterPort": "metrics_port",
    "metricsPromExporterHost": "metrics_host",
}
"""Java name to the name of a field of ``dledger.config``."""
