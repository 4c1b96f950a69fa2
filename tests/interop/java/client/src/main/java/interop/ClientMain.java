package interop;

import java.nio.charset.StandardCharsets;
import java.util.Set;
import java.util.concurrent.ConcurrentSkipListSet;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.RPCHook;

/**
 * Sends numbered messages, or receives them: {@code produce|consume|load NAME_SERVERS TOPIC COUNT}. {@code load} goes on
 * for so many seconds, whatever fails, and says for each message that was acknowledged when that was. With the
 * variables INTEROP_ACCESS_KEY and INTEROP_SECRET_KEY requests are signed.
 */
public final class ClientMain {
  private static final int TIMEOUT_S = 120;
  private static final int ROUTE_INTERVAL_MS = 500;
  private static final int PAUSE_MS = 20;

  private ClientMain() {}

  public static void main(String[] arguments) {
    int count = Integer.parseInt(arguments[3]);
    try {
      switch (arguments[0]) {
        case "produce" -> produce(arguments[1], arguments[2], count);
        case "load" -> load(arguments[1], arguments[2], count);
        default -> consume(arguments[1], arguments[2], count);
      }
    } catch (Exception error) {
      error.printStackTrace();
      System.exit(1); // the client's threads would go on
    }
  }

  private static RPCHook hook() {
    String key = System.getenv("INTEROP_ACCESS_KEY");
    return key == null ? null : new AclClientRPCHook(new SessionCredentials(key, System.getenv("INTEROP_SECRET_KEY")));
  }

  private static void produce(String nameServers, String topic, int count) throws Exception {
    DefaultMQProducer producer = new DefaultMQProducer("interop-producers", hook());
    producer.setNamesrvAddr(nameServers);
    producer.start();
    for (int number = 0; number < count; number++) {
      byte[] body = Integer.toString(number).getBytes(StandardCharsets.UTF_8);
      SendResult result = producer.send(new Message(topic, body));
      System.out.println("> " + result.getSendStatus() + " " + result.getMessageQueue().getBrokerName());
    }
    producer.shutdown();
  }

  private static void load(String nameServers, String topic, int seconds) throws Exception {
    DefaultMQProducer producer = new DefaultMQProducer("interop-producers", hook());
    producer.setNamesrvAddr(nameServers);
    producer.setPollNameServerInterval(ROUTE_INTERVAL_MS);
    producer.start();
    long begin = System.currentTimeMillis();
    for (int number = 0; System.currentTimeMillis() - begin < seconds * 1000L; number++) {
      try {
        SendResult result = producer.send(new Message(topic, Integer.toString(number).getBytes(StandardCharsets.UTF_8)));
        if (result.getSendStatus() == SendStatus.SEND_OK) {
          System.out.println("> " + number + " " + System.currentTimeMillis());
        }
      } catch (Exception error) {
        TimeUnit.MILLISECONDS.sleep(PAUSE_MS);
      }
    }
    producer.shutdown();
  }

  private static void consume(String nameServers, String topic, int count) throws Exception {
    Set<Integer> found = new ConcurrentSkipListSet<>();
    CountDownLatch all = new CountDownLatch(count);
    DefaultMQPushConsumer consumer =
        new DefaultMQPushConsumer("interop-consumers", hook(), new AllocateMessageQueueAveragely());
    consumer.setNamesrvAddr(nameServers);
    consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
    consumer.subscribe(topic, "*");
    consumer.registerMessageListener(
        (MessageListenerConcurrently)
            (messages, context) -> {
              for (MessageExt one : messages) {
                if (found.add(Integer.parseInt(new String(one.getBody(), StandardCharsets.UTF_8)))) {
                  all.countDown();
                }
              }
              return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
    consumer.start();
    if (!all.await(TIMEOUT_S, TimeUnit.SECONDS)) {
      throw new IllegalStateException("received " + found + " of " + count + " messages");
    }
    consumer.shutdown();
    found.forEach(number -> System.out.println("> " + number));
  }
}
