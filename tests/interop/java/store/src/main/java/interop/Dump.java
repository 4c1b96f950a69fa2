package interop;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.SortedSet;
import java.util.TreeMap;
import java.util.TreeSet;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.store.CommitLog;
import org.apache.rocketmq.store.ConsumeQueue;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.DispatchRequest;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.QueryMessageResult;
import org.apache.rocketmq.store.SelectMappedBufferResult;

/** Everything that the store's own methods give, one JSON object per line. */
final class Dump {
    private static final HexFormat HEX = HexFormat.of();

    /** What a Python node writes when it is elected; a message only in form. */
    private static final String TERM_START_TOPIC = "RMQ_SYS_TERM_START";

    private final DefaultMessageStore store;
    private final boolean replicated;
    private final List<String> lines = new ArrayList<>();
    private final SortedSet<List<String>> keys = new TreeSet<>((one, two) -> {
        int order = one.get(0).compareTo(two.get(0));
        return order != 0 ? order : one.get(1).compareTo(two.get(1));
    });

    Dump(DefaultMessageStore store, boolean replicated) {
        this.store = store;
        this.replicated = replicated;
    }

    List<String> lines() {
        add("store", Map.of(
            "minOffset", store.getMinPhyOffset(), "maxOffset", store.getMaxPhyOffset()));
        records();
        queues();
        queries();
        return lines;
    }

    /** The log from its beginning on, read as dispatch reads it, with every check that there is. */
    private void records() {
        CommitLog log = store.getCommitLog();
        long offset = log.getMinOffset();
        while (offset < log.getMaxOffset()) {
            SelectMappedBufferResult selected = log.getData(offset);
            if (selected == null) {
                throw new IllegalStateException("no data at " + offset);
            }
            int read = 0;
            try {
                while (read < selected.getSize()) {
                    DispatchRequest request = log.checkMessageAndReturnSize(selected.getByteBuffer(), true, true);
                    if (!request.isSuccess()) {
                        throw new IllegalStateException("no record at " + (offset + read) + ": " + request);
                    }
                    if (request.getMsgSize() == 0) {
                        break;
                    }
                    boolean entry = request.getBufferSize() != -1; // a group's log may continue a plain one
                    record(request, offset + read + (entry ? 48 : 0)); // behind an entry's header
                    read += entry ? request.getBufferSize() : request.getMsgSize();
                }
            } finally {
                selected.release();
            }
            offset = read < selected.getSize() ? log.rollNextFile(offset + read) : offset + read;
        }
    }

    private void record(DispatchRequest request, long offset) {
        MessageExt message = store.lookMessageByOffset(offset);
        Map<String, Object> fields = fields(message);
        fields.put("tagsCode", request.getTagsCode());
        fields.put("indexed", request.getSysFlag() != 0xC);
        add("record", fields);
        for (String key : request.getKeys() == null ? new String[0] : request.getKeys().split(" ")) {
            keys.add(List.of(request.getTopic(), key));
        }
        if (request.getUniqKey() != null) {
            keys.add(List.of(request.getTopic(), request.getUniqKey()));
        }
    }

    private static Map<String, Object> fields(MessageExt message) {
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("offset", message.getCommitLogOffset());
        fields.put("size", message.getStoreSize());
        fields.put("topic", message.getTopic());
        fields.put("queueId", message.getQueueId());
        fields.put("queueOffset", message.getQueueOffset());
        fields.put("flag", message.getFlag());
        fields.put("sysFlag", message.getSysFlag());
        fields.put("bornTimestamp", message.getBornTimestamp());
        fields.put("bornHost", host((InetSocketAddress) message.getBornHost()));
        fields.put("storeTimestamp", message.getStoreTimestamp());
        fields.put("storeHost", host((InetSocketAddress) message.getStoreHost()));
        fields.put("reconsumeTimes", message.getReconsumeTimes());
        fields.put("preparedOffset", message.getPreparedTransactionOffset());
        fields.put("bodyCrc", message.getBodyCRC());
        fields.put("body", message.getBody() == null ? "" : HEX.formatHex(message.getBody()));
        fields.put("properties", message.getProperties() == null ? Map.of() : new TreeMap<>(message.getProperties()));
        fields.put("messageId", message.getMsgId());
        return fields;
    }

    private static String host(InetSocketAddress address) {
        return HEX.formatHex(address.getAddress().getAddress()) + ":" + address.getPort();
    }

    private void queues() {
        var table = new TreeMap<String, TreeMap<Integer, ConsumeQueue>>();
        store.getConsumeQueueTable().forEach((topic, queues) -> table.put(topic, new TreeMap<>(queues)));
        table.forEach((topic, queues) -> queues.forEach((queueId, queue) -> {
            long min = store.getMinOffsetInQueue(topic, queueId);
            long max = store.getMaxOffsetInQueue(topic, queueId);
            List<long[]> units = new ArrayList<>();
            List<long[]> offsetsOfTimes = new ArrayList<>();
            for (long offset = min; offset < max; offset++) {
                SelectMappedBufferResult selected = queue.getIndexBuffer(offset);
                if (selected == null) {
                    continue; // a queue without messages begins at 0 for it, even if it has no file there
                }
                ByteBuffer buffer = selected.getByteBuffer();
                units.add(new long[] {buffer.getLong(), buffer.getInt(), buffer.getLong()});
                selected.release();
                if (topic.equals(TERM_START_TOPIC)) {
                    continue; // its records do not say where they are
                }
                long time = store.getMessageStoreTimeStamp(topic, queueId, offset);
                for (long asked : new long[] {time - 1, time, time + 1}) {
                    offsetsOfTimes.add(new long[] {asked, store.getOffsetInQueueByTime(topic, queueId, asked)});
                }
            }
            List<List<Object>> got = topic.equals(TERM_START_TOPIC) ? List.of() : got(topic, queueId, min, max);
            add("queue", Map.of(
                "topic", topic, "queueId", queueId, "min", min, "max", max, "units", units, "got", got,
                "offsetsOfTimes", offsetsOfTimes));
        }));
    }

    /** Queue offset, physical offset, body CRC of what consumers get. */
    private List<List<Object>> got(String topic, int queueId, long min, long max) {
        List<List<Object>> got = new ArrayList<>();
        long offset = min;
        while (offset < max) {
            GetMessageResult result = store.getMessage("interop", topic, queueId, offset, 7, null);
            for (ByteBuffer buffer : result.getMessageBufferList()) {
                MessageExt message = MessageDecoder.decode(buffer, true, false);
                got.add(List.of(message.getQueueOffset(), message.getCommitLogOffset(), message.getBodyCRC()));
            }
            result.release();
            if (result.getNextBeginOffset() <= offset) {
                throw new IllegalStateException("get stands still: " + result);
            }
            offset = result.getNextBeginOffset();
        }
        return got;
    }

    private void queries() {
        for (String topic : List.of("TopicTest", "Keys")) {
            keys.add(List.of(topic, "no-such-key"));
        }
        for (List<String> key : keys) {
            QueryMessageResult result = store.queryMessage(key.get(0), key.get(1), 64, 0, Long.MAX_VALUE);
            List<Long> offsets = new ArrayList<>();
            for (ByteBuffer buffer : result.getMessageBufferList()) {
                offsets.add(MessageDecoder.decode(buffer, true, false).getCommitLogOffset());
            }
            result.release();
            add("query", Map.of("topic", key.get(0), "key", key.get(1), "offsets", offsets));
        }
    }

    private void add(String kind, Map<String, Object> fields) {
        Map<String, Object> line = new TreeMap<>(fields);
        line.put("kind", kind);
        if (replicated) {
            line.put("replicated", true);
        }
        lines.add(JSON.toJSONString(line, SerializerFeature.MapSortField, SerializerFeature.DisableCircularReferenceDetect));
    }
}
