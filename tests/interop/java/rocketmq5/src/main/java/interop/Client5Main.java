package interop;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * A client of RocketMQ 5: {@code produce|batch|timed|poll NAME_SERVERS TOPIC COUNT}. {@code batch} sends all messages as one;
 * {@code timed} tries to have messages delivered in COUNT seconds, in every way that the client has, and prints what became
 * of each; {@code poll} gets so many messages by polling, {@code sql} by its other consumer; of those that fulfil the
 * condition behind COUNT, if there is one. {@code pop} gets so many deliveries as a push consumer whose broker assigns queues;
 * the first one of the message whose body stands behind COUNT fails.
 */
public final class Client5Main {
  private static final int TIMEOUT_S = 120;
  private static final int POLL_MS = 1000;
  private static final int CALL_MS_MAX = 30_000; // of a call: the machine may be busy

  private Client5Main() {}

  public static void main(String[] arguments) {
    int count = Integer.parseInt(arguments[3]);
    try {
      switch (arguments[0]) {
        case "produce" -> produce(arguments[1], arguments[2], count, false);
        case "batch" -> produce(arguments[1], arguments[2], count, true);
        case "timed" -> timed(arguments[1], arguments[2], count);
        case "pop" -> pop(arguments[1], arguments[2], count, arguments[4]);
        case "sql" -> sql(arguments[1], arguments[2], count, arguments[4]);
        default -> poll(arguments[1], arguments[2], count, arguments.length > 4 ? arguments[4] : "");
      }
    } catch (Exception error) {
      error.printStackTrace();
      System.exit(1); // the client's threads would go on
    }
    System.exit(0);
  }

  private static DefaultMQProducer producer(String nameServers) throws Exception {
    DefaultMQProducer producer = new DefaultMQProducer("interop-producers");
    producer.setNamesrvAddr(nameServers);
    producer.setSendMsgTimeout(CALL_MS_MAX);
    producer.setMqClientApiTimeout(CALL_MS_MAX);
    producer.start();
    return producer;
  }

  private static Message message(String topic, int number) {
    return new Message(topic, Integer.toString(number).getBytes(StandardCharsets.UTF_8));
  }

  private static void produce(String nameServers, String topic, int count, boolean together) throws Exception {
    DefaultMQProducer producer = producer(nameServers);
    List<Message> messages = new ArrayList<>();
    for (int number = 0; number < count; number++) {
      messages.add(message(topic, number));
    }
    if (together) {
      System.out.println("> " + producer.send(messages).getSendStatus());
    } else {
      for (Message one : messages) {
        System.out.println("> " + producer.send(one).getSendStatus());
      }
    }
    producer.shutdown();
  }

  private interface Send {
    Object run() throws Exception;
  }

  private static void print(String way, Send send) throws Exception {
    String found;
    try {
      found = send.run().toString();
    } catch (MQBrokerException error) {
      found = Integer.toString(error.getResponseCode());
    }
    System.out.println("> " + way + " " + found);
  }

  private static void timed(String nameServers, String topic, int seconds) throws Exception {
    DefaultMQProducer producer = producer(nameServers);
    Message first = message(topic, 0);
    first.setDelayTimeSec(seconds);
    Message second = message(topic, 1);
    second.setDelayTimeMs(seconds * 1000L);
    Message third = message(topic, 2);
    third.setDeliverTimeMs(System.currentTimeMillis() + seconds * 1000L);
    print("seconds", () -> producer.send(first).getSendStatus());
    print("milliseconds", () -> producer.send(second).getSendStatus());
    print("moment", () -> producer.send(third).getSendStatus());
    producer.shutdown();
  }

  private static void sql(String nameServers, String topic, int count, String condition) throws Exception {
    DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("interop-sql");
    consumer.setNamesrvAddr(nameServers);
    consumer.setMqClientApiTimeout(CALL_MS_MAX);
    consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
    consumer.subscribe(topic, MessageSelector.bySql(condition));
    CountDownLatch left = new CountDownLatch(count);
    consumer.registerMessageListener(
        (MessageListenerConcurrently)
            (messages, context) -> {
              for (MessageExt one : messages) {
                System.out.println("> " + new String(one.getBody(), StandardCharsets.UTF_8));
                left.countDown();
              }
              return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
    try {
      consumer.start();
    } catch (MQClientException error) {
      System.out.println("> refused " + error.getResponseCode() + " " + error.getErrorMessage());
      consumer.shutdown();
      return;
    }
    if (!left.await(TIMEOUT_S, TimeUnit.SECONDS)) {
      throw new IllegalStateException(left.getCount() + " messages are missing");
    }
    consumer.shutdown();
  }

  private static void pop(String nameServers, String topic, int count, String failing) throws Exception {
    DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("interop-poppers");
    consumer.setNamesrvAddr(nameServers);
    consumer.setMqClientApiTimeout(CALL_MS_MAX);
    consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
    consumer.setClientRebalance(false);
    consumer.subscribe(topic, "*");
    CountDownLatch left = new CountDownLatch(count);
    consumer.registerMessageListener(
        (MessageListenerConcurrently)
            (messages, context) -> {
              boolean fails = false;
              for (MessageExt one : messages) {
                String body = new String(one.getBody(), StandardCharsets.UTF_8);
                System.out.println("> " + body + " " + one.getReconsumeTimes() + " " + one.getTopic());
                fails |= body.equals(failing) && one.getReconsumeTimes() == 0;
                left.countDown();
              }
              return fails ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
    consumer.start();
    if (!left.await(TIMEOUT_S, TimeUnit.SECONDS)) {
      throw new IllegalStateException(left.getCount() + " messages are missing");
    }
    Thread.sleep(POLL_MS); // acknowledgements are not waited for
    consumer.shutdown();
  }

  private static void poll(String nameServers, String topic, int count, String condition) throws Exception {
    DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("interop-pollers");
    consumer.setNamesrvAddr(nameServers);
    consumer.setMqClientApiTimeout(CALL_MS_MAX);
    consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
    consumer.subscribe(topic, condition.isEmpty() ? MessageSelector.byTag("*") : MessageSelector.bySql(condition));
    consumer.start();
    long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(TIMEOUT_S);
    int got = 0;
    while (got < count && System.nanoTime() < end) {
      for (MessageExt one : consumer.poll(POLL_MS)) {
        System.out.println("> " + new String(one.getBody(), StandardCharsets.UTF_8));
        got++;
      }
    }
    consumer.commit();
    consumer.shutdown();
    if (got < count) {
      throw new IllegalStateException(got + " of " + count + " messages");
    }
  }
}
