"""The names of settings in RocketMQ's brokers and DLedger, and their names here."""

from __future__ import annotations

from typing import Final

ALIASES: Final = {
    # RocketMQ's broker.conf
    "dLegerGroup": "group",
    "dLegerSelfId": "node_id",
    "dLegerPeers": "members",
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

_UNUSED_TEXT: Final = """
abortFile accessMessageInMemoryMaxRatio adminBrokerThreadPoolNums allAckInSyncStateSet
autoCreateSubscriptionGroup autoCreateTopicEnable autoDeleteUnusedStats bitMapLengthConsumeQueueExt
brokerClusterName brokerFastFailureEnable brokerId brokerIP1 brokerIP2 brokerName brokerPermission brokerRole
brokerTopicEnable channelNotActiveInterval checkCRCOnRecover cleanResourceInterval
clientCallbackExecutorThreads clientManagerThreadPoolQueueCapacity clientManageThreadPoolNums
clientSocketRcvBufSize clientSocketSndBufSize clusterTopicEnable commitCommitLogLeastPages
commitCommitLogThoroughInterval commitIntervalCommitLog compressedRegister connectTimeoutMillis
consumerFallbehindThreshold consumerManagerThreadPoolQueueCapacity consumerManageThreadPoolNums
debugLockEnable defaultMessageRequestMode defaultPopShareQueueNum defaultQueryMaxNum defaultTopicQueueNums
deleteCommitLogFilesInterval deleteConsumeQueueFilesInterval destroyMapedFileInterval
destroyMapedFileIntervalForcibly disableConsumeIfConsumerReadSlowly disappearTimeAfterStart
dispatchFromSenderThread duplicationEnable enableBatchAppend enableBatchPush
enableBuildConsumeQueueConcurrently enableCalcFilterBitMap enableConsumeQueueExt enableControllerMode
enableDetailStat enableFastAdvanceCommitIndex enableLeaderElector enableLmq enableMultiDispatch
enablePropertyFilter enablePushToFollower enableScheduleAsyncDeliver enableScheduleMessageStats
enableSlaveActingMaster enableSnapshot endTransactionPoolQueueCapacity endTransactionThreadPoolNums
expectConsumerNumUseFilter fastFailIfNoBufferInStorePool fetchNamesrvAddrByAddressServer
filterDataCleanTimeSpan filterServerNums filterSupportRetry flushCommitLogLeastPages
flushCommitLogThoroughInterval flushCommitLogTimed flushConsumeQueueLeastPages
flushConsumeQueueThoroughInterval flushConsumerOffsetHistoryInterval flushConsumerOffsetInterval
flushDelayOffsetInterval flushIntervalCommitLog flushIntervalConsumeQueue flushLeastPagesWhenWarmMapedFile
forceRegister haHousekeepingInterval haListenPort haMasterAddress haSendHeartbeatInterval haSlaveFallbehindMax
haTransferBatchSize heartbeatThreadPoolNums heartbeatThreadPoolQueueCapacity highSpeedMode inSyncReplicas
isEnableBatchPush kerberosEnable loadBalancePollNameServerInterval longPollingEnable mapedFileSizeCommitLog
mappedFileSizeConsumeQueue mappedFileSizeConsumeQueueExt maxBatchAppendIntervalMs maxBatchAppendSize
maxBatchPushSize maxDelayTime maxErrorRateOfBloomFilter maxHashSlotNum maxIndexNum maxLmqConsumeQueueNum
maxMessageSize maxMsgsNumBatch maxPopPollingSize maxSnapshotReservedNum maxTakeLeadershipVoteIntervalMs
maxTransferBytesOnMessageInDisk maxTransferBytesOnMessageInMemory maxTransferCountOnMessageInDisk
maxTransferCountOnMessageInMemory messageDelayLevel messageIndexEnable messageIndexSafe messageStorePlugIn
metricGrpcExporterIntervalInMills metricGrpcExporterTimeOutInMills metricLoggingExporterIntervalInMills
metricsExporterType metricsGrpcExporterHeader metricsGrpcExporterTarget minInSyncReplicas
minTakeLeadershipVoteIntervalMs msgTraceTopicName namesrvAddr
namesrvDomain namesrvDomainSubgroup notifyConsumerIdsChangedEnable offsetCheckInSlave
osPageCacheBusyTimeOutMills peerPushQuota peerPushThrottlePoint popPollingMapSize popPollingSize
printStoreThreadPoolTimeInterval processReplyMessageThreadPoolNums pullMessageThreadPoolNums
pullThreadPoolQueueCapacity putMsgIndexHightWater queryMessageThreadPoolNums queryThreadPoolQueueCapacity
redeleteHangedFileInterval regionId registerBrokerTimeoutMills registerNameServerPeriod
rejectTransactionMessage replyThreadPoolQueueCapacity resetSnapshotEntriesButKeepLastEntriesNum
resetSnapshotEntriesDelayTime rocketmqHome sendMessageThreadPoolNums sendThreadPoolQueueCapacity
serverAsyncSemaphoreValue serverCallbackExecutorThreads serverChannelMaxIdleTimeSeconds
serverOnewaySemaphoreValue serverPooledByteBufAllocatorEnable serverSelectorThreads serverSocketBacklog
serverSocketRcvBufSize serverSocketSndBufSize serverWorkerThreads shortPollingTimeMills skipPreOnlineHA
slaveReadEnable snapshotEntryResetStrategy snapshotThreshold startAcceptSendRequestTimeStamp
startRealTimeNotifyThread storeCheckpoint storePathCommitLog storePathConsumeQueue storePathIndex
storeReplyMessageEnable storeType syncFlushTimeout timerPrecisionMs timerWheelEnable totalReplicas traceOn
traceTopicEnable transactionCheckInterval transactionCheckMax transactionTimeOut transferMsgByHeap
transientStorePoolEnable transientStorePoolSize translateMsgIdEnable useEpollNativeSelector
useReentrantLockWhenPutMessage useTLS waitTimeMillsInHeartbeatQueue scheduleAsyncDeliverMaxPendingLimit
scheduleAsyncDeliverMaxResendNum2Blocked slaveTimeout diskFallRecorded diskSpaceWarningLevelRatio
diskSpaceCleanForciblyRatio waitTimeMillsInPullQueue
waitTimeMillsInSendQueue waitTimeMillsInTransactionQueue warmMapedFileEnable
clientAsyncSemaphoreValue clientChannelMaxIdleTimeSeconds clientCloseSocketIfTimeout clientOnewaySemaphoreValue
clientPooledByteBufAllocatorEnable clientWorkerThreads commercialBaseCount commercialBigCount commercialEnable
commercialTimerCount commercialTransCount configBlackList isolateLogEnable putMessageFutureThreadPoolNums
putThreadPoolQueueCapacity tls.client.authServer writeBufferHighWaterMark writeBufferLowWaterMark
"""

UNUSED: Final = frozenset(_UNUSED_TEXT.split())
"""Names that RocketMQ or DLedger know and that change nothing here (yet)."""
