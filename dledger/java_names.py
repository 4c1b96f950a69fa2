"""Names of settings of RocketMQ 4.9 and 5.x and of DLedger: those with an effect here, and those that change nothing.

The latter are in families with one reason each. A server given such a name says what that means
(``dledger.setting_sources``), and so does docs/configuration.md. Names with an effect are in ``ALIASES`` and in the
records of settings; the names of a broker stand here as well, for nodes and name servers, which do not read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
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
    "fileReservedHours": "retention_hours",
    "diskSpaceRatioToCheckExpired": "disk_check_ratio",
    "diskSpaceRatioToForceClean": "disk_clean_ratio",
    "enableDiskForceClean": "force_clean",
    "maxPendingRequestsNum": "pending_entries_max",
    "maxWaitAckTimeMs": "ack_timeout_ms",
    "maxPushTimeOutMs": "push_timeout_ms",
    "heartBeatTimeIntervalMs": "heartbeat_interval_ms",
    "leadershipTransferWaitTimeout": "transfer_timeout_ms",
    "metricsPromExporterPort": "metrics_port",
    "metricsPromExporterHost": "metrics_host",
}
"""Java name to the name of a field of ``dledger.config``."""


class Idleness(StrEnum):
    """Why a name changes nothing."""

    MEANINGLESS = "no purpose here"
    UNSUPPORTED = "not supported"


class Risk(StrEnum):
    """The subject of a setting that changes nothing."""

    SECURITY = "security"
    DURABILITY = "durability"
    AVAILABILITY = "availability"


@dataclass(frozen=True, slots=True)
class Family:
    """Names that change nothing for the same reason; ``subject`` is a few words, ``means`` sentences."""

    subject: str
    idleness: Idleness
    means: str
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Alarm:
    """A setting whose user expects protection that the server does not give; ``means`` completes "NAME=VALUE …"."""

    risk: Risk
    means: str


SWITCHED_OFF: Final = frozenset({"", "false", "no", "off", "0", "default", "defaultfilequeue", "file", "disable"})
"""Values, in lower case, that ask an unsupported feature for nothing."""

ALARMS: Final = {
    **dict.fromkeys(
        ("authenticationEnabled", "authorizationEnabled"),
        Alarm(
            Risk.SECURITY, "protects nothing: list the accounts in acl_file and set aclEnable=true (docs/security.md)"
        ),
    ),
    "kerberosEnable": Alarm(Risk.SECURITY, "protects nothing: use aclEnable=true or certificates (docs/security.md)"),
    "useTLS": Alarm(
        Risk.SECURITY,
        "encrypts nothing: set namesrv_tls=true for name servers, and tls_cert_path and the others for clients",
    ),
    "tls.config.file": Alarm(Risk.SECURITY, "is not read and encrypts nothing: move its lines into this file"),
    "allAckInSyncStateSet": Alarm(
        Risk.DURABILITY, "changes nothing: messages are acknowledged once inSyncReplicas brokers have them"
    ),
    "messageStorePlugIn": Alarm(
        Risk.DURABILITY, "moves nothing to other storage: files older than fileReservedTime hours are removed for good"
    ),
    "enableControllerInNamesrv": Alarm(
        Risk.AVAILABILITY, "starts no controller, so brokers in controller mode get no master from this name server"
    ),
}
"""By name, for every value that is not ``SWITCHED_OFF``."""


def _family(subject: str, idleness: Idleness, means: str, names: str) -> Family:
    return Family(subject, idleness, means, frozenset(names.split()))


FAMILIES: Final = (
    _family(
        "of brokers",
        Idleness.MEANINGLESS,
        "`dledger broker` reads them; a node of `dledger serve` and a name server have no messages.",
        """
        accessMessageInMemoryMaxRatio autoCreateSubscriptionGroup autoCreateTopicEnable bindAddress
        brokerClusterName brokerId brokerIP1 brokerName brokerPermission brokerRole checkCRCOnRecover
        cleanResourceInterval commitCommitLogLeastPages commitCommitLogThoroughInterval
        commitIntervalCommitLog defaultQueryMaxNum defaultTopicQueueNums deleteCommitLogFilesInterval
        diskSpaceCleanForciblyRatio
        diskSpaceWarningLevelRatio enablePropertyFilter fastFailIfNoBufferInStorePool flushCommitLogLeastPages
        flushCommitLogThoroughInterval flushCommitLogTimed flushConsumeQueueLeastPages
        flushConsumeQueueThoroughInterval flushIntervalCommitLog
        flushIntervalConsumeQueue haHousekeepingInterval haListenPort haMasterAddress haMaxGapNotInSync
        haSendHeartbeatInterval haSlaveFallbehindMax haTransferBatchSize inSyncReplicas
        mappedFileSizeConsumeQueue maxHashSlotNum maxIndexNum maxMessageSize maxMsgsNumBatch
        maxTransferBytesOnMessageInDisk maxTransferBytesOnMessageInMemory maxTransferCountOnMessageInDisk
        maxTransferCountOnMessageInMemory messageDelayLevel messageIndexEnable messageIndexSafe
        minInSyncReplicas namesrvAddr offsetCheckInSlave osPageCacheBusyTimeOutMills
        registerBrokerTimeoutMills registerNameServerPeriod
        rejectTransactionMessage slaveReadEnable slaveTimeout storePathCommitLog
        syncFlushTimeout timerMaxDelaySec transactionCheckInterval transactionCheckMax transactionTimeOut
        transientStorePoolEnable transientStorePoolSize
        tls.client.certPath tls.client.keyPath tls.client.trustCertPath tls.enable tls.server.mode
        """,
    ),
    _family(
        "of name servers",
        Idleness.MEANINGLESS,
        "`dledger nameserver` reads them.",
        """
        kvConfigPath orderMessageEnable
        """,
    ),
    _family(
        "no thread pools",
        Idleness.MEANINGLESS,
        "One event loop serves all clients, and pending work is limited in messages and bytes "
        "(`pending_entries_max`, `send_pending_messages_max`), so there are no thread pools, queues per kind "
        "of request or locks to choose.",
        """
        adminBrokerThreadPoolNums adminBrokerThreadPoolQueueCapacity asyncSendEnable
        batchDispatchRequestThreadPoolNums brokerFastFailureEnable clientAsyncSemaphoreValue
        clientCallbackExecutorThreads clientManagerThreadPoolQueueCapacity clientManageThreadPoolNums
        clientOnewaySemaphoreValue clientRequestThreadPoolNums clientRequestThreadPoolQueueCapacity
        clientWorkerThreads consumerFallbehindThreshold consumerManagerThreadPoolQueueCapacity
        consumerManageThreadPoolNums defaultThreadPoolNums defaultThreadPoolQueueCapacity
        disableCallbackExecutor disableConsumeIfConsumerReadSlowly disableNettyWorkerGroup
        dispatchCqCacheNum dispatchCqThreads dispatchFromSenderThread enableAsyncReput
        enableBuildConsumeQueueConcurrently endTransactionPoolQueueCapacity endTransactionThreadPoolNums
        heartbeatThreadPoolNums heartbeatThreadPoolQueueCapacity litePullMessageThreadPoolNums
        litePullThreadPoolQueueCapacity maxAsyncPutMessageRequests printStoreThreadPoolTimeInterval
        processReplyMessageThreadPoolNums pullMessageThreadPoolNums pullThreadPoolQueueCapacity
        putMessageFutureThreadPoolNums putMessageTimeout putThreadPoolQueueCapacity
        queryMessageThreadPoolNums queryThreadPoolQueueCapacity recoverConcurrently recoverThreadPoolNums
        replyThreadPoolQueueCapacity sendMessageThreadPoolNums sendThreadPoolQueueCapacity
        serverAsyncSemaphoreValue serverCallbackExecutorThreads serverNettyWorkerGroupEnable
        serverOnewaySemaphoreValue serverSelectorThreads serverWorkerThreads
        spinLockCollisionRetreatOptimalDegree startAcceptSendRequestTimeStamp topicQueueLockNum
        unRegisterBrokerQueueCapacity useABSLock useReentrantLockWhenPutMessage
        waitTimeMillsInAdminBrokerQueue waitTimeMillsInHeartbeatQueue waitTimeMillsInLitePullQueue
        waitTimeMillsInPullQueue waitTimeMillsInSendQueue waitTimeMillsInTransactionQueue
        """,
    ),
    _family(
        "no Netty",
        Idleness.MEANINGLESS,
        "The system and gRPC size the buffers of connections; what a connection may occupy is limited "
        "(`connections_max` and the settings beside it).",
        """
        channelExpiredTimeout channelNotActiveInterval clientChannelMaxIdleTimeSeconds
        clientCloseSocketIfTimeout clientPooledByteBufAllocatorEnable clientSocketRcvBufSize
        clientSocketSndBufSize connectTimeoutMillis enableFastChannelEventProcess enableNetWorkFlowControl
        enableReconnectForGoAway enableShutdownGracefully enableTransparentRetry highSpeedMode
        maxReconnectIntervalTimeSeconds serverChannelMaxIdleTimeSeconds serverPooledByteBufAllocatorEnable
        serverSocketBacklog serverSocketRcvBufSize serverSocketSndBufSize shutdownWaitTimeSeconds
        socksProxyConfig transferMsgByHeap useEpollNativeSelector writeBufferHighWaterMark
        writeBufferLowWaterMark
        """,
    ),
    _family(
        "registration has no variants",
        Idleness.MEANINGLESS,
        "A broker registers all topics with every server in `namesrv_addr`, each time, uncompressed, and at "
        "once when something changes.",
        """
        compressedRegister enableSingleTopicRegister enableSplitMetadata enableSplitRegistration
        forceRegister splitMetadataSize splitRegistrationSize
        """,
    ),
    _family(
        "slaves need none",
        Idleness.MEANINGLESS,
        "Slaves connect to the address that the master gives its clients, as fast as they can write; a group "
        "has Raft instead.",
        """
        brokerIP2 duplicationEnable haFlowControlEnable maxHaTransferByteInSecond
        """,
    ),
    _family(
        "delays need none",
        Idleness.MEANINGLESS,
        "Delayed messages are delivered in batches, and their progress is saved every second.",
        """
        delayOffsetUpdateVersionStep enableScheduleAsyncDeliver enableScheduleMessageStats
        flushDelayOffsetInterval maxDelayTime
        scheduleAsyncDeliverMaxPendingLimit scheduleAsyncDeliverMaxResendNum2Blocked
        """,
    ),
    _family(
        "statistics need none",
        Idleness.MEANINGLESS,
        "Statistics are differences of totals, which cost nothing per message, and there is one log file.",
        """
        accountStatsEnable accountStatsPrintZeroValues autoDeleteUnusedStats commercialBaseCount
        commercialBigCount commercialEnable commercialSizePerMsg commercialTimerCount commercialTransCount
        debugLockEnable diskFallRecorded enableDetailStat estimateAccumulation isolateLogEnable
        maxStatsIdleTimeInMinutes printChannelGroups printChannelGroupsMinNum sampleCountThreshold sampleSteps
        transactionMetricFlushInterval
        """,
    ),
    _family(
        "no snapshots",
        Idleness.MEANINGLESS,
        "A member that lags too far restarts at the leader's first kept entry.",
        """
        enableSnapshot maxSnapshotReservedNum resetSnapshotEntriesButKeepLastEntriesNum
        resetSnapshotEntriesDelayTime snapshotEntryResetStrategy snapshotThreshold
        """,
    ),
    _family(
        "pushes are always batched",
        Idleness.MEANINGLESS,
        "Pushes are always batched, up to `push_bytes_max`, and limited by `inflight_pushes_max`, not by a rate.",
        """
        enableBatchAppend enableBatchPush enablePushToFollower isEnableBatchPush maxBatchAppendIntervalMs
        maxBatchAppendSize maxBatchPushSize peerPushQuota peerPushThrottlePoint
        """,
    ),
    _family(
        "elections are always on",
        Idleness.MEANINGLESS,
        "Elections are always on, leadership moves to a preferred member that lags by at most 1000 entries, and "
        "a leader starts its term with a NOOP.",
        """
        checkTransferLeaderInterval enableFastAdvanceCommitIndex enableLeaderElector
        maxLeadershipTransferWaitIndex maxTakeLeadershipVoteIntervalMs
        minTakeLeadershipVoteIntervalMs
        """,
    ),
    _family(
        "offsets are in the log",
        Idleness.MEANINGLESS,
        "Offset commits are written to the log, clients are told of changes at once, and every consumer may pull.",
        """
        broadcastOffsetExpireMaxSecond broadcastOffsetExpireSecond clearRetryTopicWhenDeleteTopic
        consumerOffsetUpdateVersionStep disappearTimeAfterStart enableBroadcastOffsetStore
        enableCleanExpiredOffset enableRegisterProducer flushConsumerOffsetHistoryInterval
        flushConsumerOffsetInterval litePullMessageEnable notifyConsumerIdsChangedEnable
        realTimeNotifyConsumerChange rejectPullConsumerEnable startRealTimeNotifyThread
        subscriptionExpiredTimeout useServerSideResetOffset
        """,
    ),
    _family(
        "transactions need none",
        Idleness.MEANINGLESS,
        "The ends of transactions are written one by one.",
        """
        transactionOpBatchInterval transactionOpMsgMaxSize
        """,
    ),
    _family(
        "routes are always served",
        Idleness.MEANINGLESS,
        "A name server answers as soon as it listens, lists its topics, and drops brokers that stop registering.",
        """
        clusterTest configStorePath deleteTopicWithBrokerRegistration enableAllTopicList enableTopicList
        needWaitForService productEnvName returnOrderTopicConfigToBroker scanNotActiveBrokerInterval
        waitSecondsForService
        """,
    ),
    _family(
        "reads have other limits",
        Idleness.MEANINGLESS,
        "What one response may contain is limited in messages and bytes, only committed messages are read, and a pull "
        "waits as long as it asks to (at most `pull_wait_ms_max`).",
        """
        correctLogicMinOffsetForceInterval correctLogicMinOffsetSleepInterval longPollingEnable maxConsumeQueueScan
        maxFilterMessageSize pullBatchMaxMessageCount readUnCommitted shortPollingTimeMills
        travelCqFileNumWhenGetMessage
        """,
    ),
    _family(
        "files have one form",
        Idleness.MEANINGLESS,
        "Files have fixed paths below `storePathRootDir`, are checked, written and removed in one way, and "
        "every record is verified when it is read.",
        """
        abortFile checkPointInterval cleanSwapedMapInterval commitLogForceSwapMapInterval commitLogSwapMapInterval
        commitLogSwapMapReserveFileNum deleteConsumeQueueFilesInterval deleteFileBatchMax destroyMapedFileInterval
        destroyMapedFileIntervalForcibly enableAcceleratedRecovery enabledAppendPropCRC
        enableLogConsumeQueueRepeatedlyBuildWhenRecover enableRunningFlagsInFlush
        flushLeastPagesWhenWarmMapedFile forceVerifyPropCRC logicalDiskSpaceCleanForciblyThreshold
        logicQueueForceSwapMapInterval logicQueueSwapMapInterval logicQueueSwapMapReserveFileNum
        mappedFileSwapEnable maxBatchDeleteFilesNum maxChecksumRange maxRecoveryCommitlogFiles
        putConsumeQueueDataByFileChannel putMsgIndexHightWater recheckReputOffsetFromCq redeleteHangedFileInterval
        rocketmqHome
        storeCheckpoint storePathConsumeQueue storePathIndex wakeCommitWhenPutMessage
        wakeFlushWhenPutMessage warmMapedFileEnable writeWithoutMmap
        """,
    ),
    _family(
        "built-in topics are fixed",
        Idleness.MEANINGLESS,
        "They belong to RocketMQ's cloud offerings and its built-in topics; what a running broker may change "
        "is a short list.",
        """
        brokerTopicEnable clusterTopicEnable configBlackList enableCreateSysGroup regionId
        translateMsgIdEnable validateSystemTopicWhenUpdateTopic
        """,
    ),
    _family(
        "looking up name servers",
        Idleness.UNSUPPORTED,
        "List the addresses of name servers in `namesrvAddr`: they are not looked up over HTTP or DNS.",
        """
        fetchNamesrvAddrByAddressServer fetchNameSrvAddrByDnsLookup fetchNamesrvAddrInterval
        loadBalancePollNameServerInterval namesrvDomain namesrvDomainSubgroup rmqAddressServerDomain
        rmqAddressServerSubGroup scanAvailableNameSrv updateNameServerAddrPeriod updateNamesrvAddrInterval
        """,
    ),
    _family(
        "TLS by other names",
        Idleness.UNSUPPORTED,
        "Certificates and keys are PEM files without a password, set by `tls_cert_path` and the settings "
        "beside it; the other side is always verified.",
        """
        kerberosEnable tls.client.authServer tls.client.keyPassword tls.config.file tls.server.keyPassword
        tls.test.mode.enable useTLS
        """,
    ),
    _family(
        "RocketMQ 5's authentication",
        Idleness.UNSUPPORTED,
        "Accounts and permissions are in `acl_file`, switched on by `aclEnable=true`.",
        """
        aclCacheExpiredSecond aclCacheMaxNum aclCacheRefreshSecond authConfigPath authenticationEnabled
        authenticationMetadataProvider authenticationProvider authenticationStrategy
        authenticationWhitelist authorizationEnabled authorizationMetadataProvider authorizationProvider
        authorizationStrategy authorizationWhitelist configName initAuthenticationUser
        innerClientAuthenticationCredentials migrateAuthFromV1Enabled
        statefulAuthenticationCacheExpiredSecond statefulAuthenticationCacheMaxNum
        statefulAuthorizationCacheExpiredSecond statefulAuthorizationCacheMaxNum userCacheExpiredSecond
        userCacheMaxNum userCacheRefreshSecond
        """,
    ),
    _family(
        "RocketMQ 5's controller",
        Idleness.UNSUPPORTED,
        "Masters are elected by the broker group itself: `enableDLegerCommitLog=true` with `dLegerGroup`, "
        "`dLegerPeers` and `dLegerSelfId`.",
        """
        allAckInSyncStateSet asyncLearner brokerElectionPriority brokerHeartbeatInterval
        brokerNotActiveTimeoutMillis checkSyncStateSetPeriod controllerAddr controllerDLegerGroup
        controllerDLegerPeers controllerDLegerSelfId controllerHeartBeatTimeoutMills
        controllerRequestThreadPoolQueueCapacity controllerStorePath controllerThreadPoolNums
        controllerType electMasterMaxRetryCount enableAutoInSyncReplicas enableControllerInNamesrv
        enableControllerMode enableElectUncleanMaster fetchControllerAddrByDnsLookup
        haMaxTimeSlaveNotCatchup jraftConfig jRaftControllerRPCAddr jRaftElectionTimeoutMs jRaftGroupId
        jRaftInitConf jRaftScanWaitTimeoutMs jRaftServerId jRaftSnapshotIntervalSecs mappedFileSize
        maxSlaveResendLength notifyBrokerRoleChanged processReadEvent scanInactiveMasterInterval
        sendHeartbeatTimeoutMillis skipPreOnline skipPreOnlineHA storePathBrokerIdentity
        storePathEpochFile syncBrokerMetadataPeriod syncControllerMetadataPeriod syncFromLastFile
        syncMasterFlushOffsetWhenStartup totalReplicas
        """,
    ),
    _family(
        "broker containers and acting masters",
        Idleness.UNSUPPORTED,
        "Start one `dledger broker` per broker; a slave never acts as the master.",
        """
        brokerConfigPath brokerConfigPaths cleanOfflineBrokerInterval compatibleWithOldNameSrv
        enableRemoteEscape enableSlaveActingMaster forwardTimeout inBrokerContainer lockInStrictMode
        notifyMinBrokerIdChanged replicasPerDiskPartition supportActingMaster syncBrokerMemberGroupPeriod
        """,
    ),
    _family(
        "tuning of pop",
        Idleness.UNSUPPORTED,
        "Pop is always available, and its state is in the log; `mqadmin setConsumeMode` switches a group to it.",
        """
        ackMessageThreadPoolNums ackThreadPoolQueueCapacity appendAckAsync appendCkAsync
        defaultMessageRequestMode defaultPopShareQueueNum enableNotifyAfterPopOrderLockRelease
        enableNotifyBeforePopCalculateLag enablePopBatchAck enablePopBufferMerge enablePopLog
        enablePopMessageThreshold enablePopMetrics enableRetryTopicV2 enableSkipLongAwaitingAck
        initPopOffsetByCheckMsgInMem loadBalanceProcessorThreadPoolNums loadBalanceThreadPoolQueueCapacity
        maxPopPollingSize popCkMaxBufferSize popCkOffsetMaxQueueSize popCkStayBufferTime
        popCkStayBufferTimeOut popConsumerFSServiceInit popConsumerKVServiceEnable
        popConsumerKVServiceInit popConsumerKVServiceLog popFromRetryProbability
        popInflightMessageThreshold popLongPollingForceNotifyInterval popPollingMapExpireTimeSeconds
        popPollingMapSize popPollingSize popResponseReturnActualRetryTopic popReviveMaxAttemptTimes
        popReviveMaxReturnSizePerRead retrieveMessageFromPopRetryTopicV1 reviveAckWaitMs reviveInterval
        reviveMaxSlow reviveQueueNum reviveScanTime serverLoadBalancerEnable skipWhenCKRePutReachMaxTimes
        waitTimeMillsInAckQueue
        """,
    ),
    _family(
        "timed messages of RocketMQ 5",
        Idleness.UNSUPPORTED,
        "Timed messages need no wheel: see `timer_max_delay_sec` and the settings beside it.",
        """
        allowRecallWhenBrokerNotWriteable mappedFileSizeTimerLog recallMessageEnable
        timerCongestNumEachSlot timerEnableCheckMetrics timerEnableRetryUntilSuccess timerFlushIntervalMs
        timerGetMessageThreadNum timerInterceptDelayLevel timerMetricSmallThreshold
        timerPrecisionMs timerProgressLogIntervalMs timerPutMessageThreadNum timerRollWindowSlot
        timerSkipUnknownError timerStopEnqueue timerWheelEnable
        """,
    ),
    _family(
        "kinds of queues and messages of RocketMQ 5",
        Idleness.UNSUPPORTED,
        "There are no light, batched, static or compacted queues, and replies are delivered but not stored.",
        """
        autoMessageVersionOnTopicLen compactionCqMappedFileSize compactionMappedFileSize
        compactionScheduleInternal compactionThreadNum enableCompaction enableLmq enableLmqStats
        enableMixedMessageType enableMultiDispatch mapperFileSizeBatchConsumeQueue maxLmqConsumeQueueNum
        maxOffsetMapSize maxTopicLength searchBcqByCacheEnable storeReplyMessageEnable
        useStaticSubscription
        """,
    ),
    _family(
        "bit maps of SQL92 filters",
        Idleness.MEANINGLESS,
        "A filter reads the messages themselves. Those that a group gets again are not filtered a second time.",
        """
        bitMapLengthConsumeQueueExt enableCalcFilterBitMap enableConsumeQueueExt
        expectConsumerNumUseFilter filterDataCleanTimeSpan filterServerNums filterSupportRetry
        mappedFileSizeConsumeQueueExt maxErrorRateOfBloomFilter
        """,
    ),
    _family(
        "RocksDB",
        Idleness.UNSUPPORTED,
        "Queues and metadata are in RocketMQ's classic files.",
        """
        batchWriteKvCqSize bottomMostCompressionTypeForConsumeQueueStore cleanRocksDBDirtyCQIntervalMin
        combineAssignOffsetCQType combineCQEnableCheckSelf combineCQLoadingCQTypes
        combineCQMaxExtraSearchCommitLogFiles combineCQPreferCQType configManagerVersion enableRocksDBLog
        memTableFlushInterval memTableFlushIntervalMs realTimePersistRocksDBConfig rocksdbCompressionType
        rocksdbCQDoubleWriteEnable rocksdbFlushWalFrequency rocksdbWalFileRollingThreshold
        statRocksDBCQIntervalSec storeType transferMetadataJsonToRocksdb transferOffsetJsonToRocksdb
        """,
    ),
    _family(
        "tiered storage",
        Idleness.UNSUPPORTED,
        "Files stay on the disk until retention removes them.",
        """
        commitLogRollingInterval commitLogRollingMinimumSize maxCommitJitter messageStorePlugIn
        objectStoreAccessKey objectStoreBucket objectStoreEndpoint objectStoreSecretKey ossAccessKey
        ossBucket ossEndpoint ossSecretKey readAheadBatchSizeFactorThreshold readAheadCacheEnable
        readAheadCacheExpireDuration readAheadCacheSizeThresholdRate readAheadMaxFactor
        readAheadMessageCountThreshold readAheadMessageSizeThreshold readAheadMinFactor
        recordGetMessageResult tieredBackendServiceProvider tieredMetadataServiceProvider
        tieredStorageLevel tieredStoreCommitLogMaxSize tieredStoreConsumeQueueMaxSize
        tieredStoreCrcCheckEnable tieredStoreDeleteFileEnable tieredStoreDeleteFileInterval
        tieredStoreFilePath tieredStoreFilepath tieredStoreFileReservedTime tieredStoreGroupCommit
        tieredStoreGroupCommitCount tieredStoreGroupCommitSize tieredStoreGroupCommitTimeout
        tieredStoreIndexFileMaxHashSlotNum tieredStoreIndexFileMaxIndexNum
        tieredStoreIndexFileRollingIdleInterval tieredStoreMaxGroupCommitCount tieredStoreMaxPendingLimit
        """,
    ),
    _family(
        "control of cold reads",
        Idleness.UNSUPPORTED,
        "Large reads are limited by `fetch_rate_bytes_max` and the settings beside it.",
        """
        accessMessageInMemoryHotRatio cgColdReadThreshold coldCtrStrategyEnable coldDataFlowControlEnable
        coldDataScanEnable dataReadAheadEnable globalColdReadThreshold timerColdDataCheckIntervalMs
        usePIDColdCtrStrategy
        """,
    ),
    _family(
        "RocketMQ's traces and exporters",
        Idleness.UNSUPPORTED,
        "Metrics are served for Prometheus at `metricsPromExporterPort`, if that is set.",
        """
        enableConnectionMetrics enableLagAndDlqMetrics enableMessageStoreMetrics enableRemotingMetrics
        enableRequestMetrics enableStatsMetrics enableTransactionMetrics metricGrpcExporterIntervalInMills
        metricGrpcExporterTimeOutInMills metricLoggingExporterIntervalInMills metricsExporterType
        metricsGrpcExporterHeader metricsGrpcExporterTarget metricsInDelta metricsLabel
        metricsOtelCardinalityLimit msgTraceTopicName traceOn traceTopicEnable
        """,
    ),
    _family(
        "names that RocketMQ ignores as well",
        Idleness.UNSUPPORTED,
        "Those in use are `brokerClusterName`, `mappedFileSizeCommitLog` and `mappedFileSizeConsumeQueue`; open "
        "transactions are always checked.",
        """
        checkTransactionMessageEnable clusterName mapedFileSizeCommitLog mapedFileSizeConsumeQueue
        """,
    ),
)
"""All of them; a name belongs to one family."""

UNUSED: Final = frozenset(name for family in FAMILIES for name in family.names)
"""Every name of theirs."""
_FAMILY_OF: Final = {name: family for family in FAMILIES for name in family.names}


def family_of(name: str) -> Family:
    """The family of a known name; DLedger's own settings, which name servers do not have, belong to brokers."""
    return _FAMILY_OF.get(name, FAMILIES[0])
