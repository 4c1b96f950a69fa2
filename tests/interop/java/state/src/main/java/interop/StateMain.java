package interop;

import java.lang.reflect.Method;
import java.nio.file.Path;
import java.util.List;
import org.apache.rocketmq.broker.offset.ConsumerOffsetManager;
import org.apache.rocketmq.broker.subscription.SubscriptionGroupManager;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.protocol.body.TopicConfigSerializeWrapper;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.schedule.DelayOffsetSerializeWrapper;

/** Reads and writes the files of a broker's state with the classes of RocketMQ's own broker. */
public final class StateMain {
    public static void main(String[] arguments) throws Exception {
        Path directory = Path.of(arguments[1]);
        switch (arguments[0]) {
            case "read" -> read(directory);
            case "commit" -> commit(directory);
            case "settings" -> settings();
            default -> throw new IllegalArgumentException(arguments[0]);
        }
    }

    /** One line for each thing that the files say. */
    private static void read(Path directory) throws Exception {
        TopicConfigSerializeWrapper topics = parse(directory, "topics.json", TopicConfigSerializeWrapper.class);
        topics.getTopicConfigTable().values().forEach(topic -> System.out.printf("topic %s %d %d %d%n",
            topic.getTopicName(), topic.getReadQueueNums(), topic.getWriteQueueNums(), topic.getPerm()));
        ConsumerOffsetManager offsets = offsets(directory);
        offsets.getOffsetTable().forEach((key, queues) -> queues.forEach((queue, offset) ->
            System.out.printf("offset %s %d %d%n", key, queue, offset)));
        SubscriptionGroupManager groups = parse(directory, "subscriptionGroup.json", SubscriptionGroupManager.class);
        System.out.printf("group readers %d%n", groups.getSubscriptionGroupTable().get("readers").getRetryMaxTimes());
        DelayOffsetSerializeWrapper delays = parse(directory, "delayOffset.json", DelayOffsetSerializeWrapper.class);
        delays.getOffsetTable().forEach((level, offset) -> System.out.printf("delay %d %d%n", level, offset));
    }

    /** The names that a broker's conf file may set: those of the classes that BrokerStartup fills from it. */
    private static void settings() {
        for (Class<?> kind : List.of(
            BrokerConfig.class, NettyServerConfig.class, NettyClientConfig.class, MessageStoreConfig.class)) {
            MixAll.object2Properties(newInstance(kind)).stringPropertyNames().forEach(System.out::println);
            for (Method method : kind.getMethods()) {
                if (method.getName().startsWith("set") && method.getParameterCount() == 1) {
                    System.out.println(method.getName().substring(3, 4).toLowerCase() + method.getName().substring(4));
                }
            }
        }
    }

    private static Object newInstance(Class<?> kind) {
        try {
            return kind.getDeclaredConstructor().newInstance();
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException(error);
        }
    }

    /** As a broker of RocketMQ's does whose consumers went on. */
    private static void commit(Path directory) throws Exception {
        ConsumerOffsetManager offsets = offsets(directory);
        offsets.commitOffset("client", "readers", "Orders", 0, 12);
        MixAll.string2File(offsets.encode(true), directory.resolve("consumerOffset.json").toString());
    }

    private static ConsumerOffsetManager offsets(Path directory) throws Exception {
        ConsumerOffsetManager offsets = new ConsumerOffsetManager();
        offsets.decode(MixAll.file2String(directory.resolve("consumerOffset.json").toString()));
        return offsets;
    }

    private static <T> T parse(Path directory, String name, Class<T> kind) throws Exception {
        return RemotingSerializable.fromJson(MixAll.file2String(directory.resolve(name).toString()), kind);
    }
}
