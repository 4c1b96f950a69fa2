package interop;

import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.util.Set;
import java.util.concurrent.ConcurrentSkipListSet;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.RPCHook;

/**
 * Sends numbered messages, or receives them: {@code produce|consume|share|load|transact NAME_SERVERS TOPIC COUNT}. {@code
 * share} says of each message which queue it came from, until its input ends. {@code load} and {@code transact} go on for so
 * many seconds, whatever fails, and say for each message that was acknowledged when that was, and {@code load} by which
 * brokers. Of four transactions, one is committed at once, one is rolled back at once, and two when the broker asks: the
 * one is committed, the other rolled back. {@code transact} answers until its input ends. {@code sql ... CONDITION} receives so
 * many messages that fulfil a condition. With the variables
 * INTEROP_ACCESS_KEY and INTEROP_SECRET_KEY requests are signed.
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
        case "share" -> share(arguments[1], arguments[2]);
        case "transact" -> transact(arguments[1], arguments[2], count);
        case "sql" -> sql(arguments[1], arguments[2], count, arguments[4]);
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
    producer.setSendMsgTimeout(TIMEOUT_S * 1000); // a busy machine may need more than 3 s for the first one
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
          String broker = result.getMessageQueue().getBrokerName();
          System.out.println("> " + number + " " + System.currentTimeMillis() + " " + broker);
        }
      } catch (Exception error) {
        TimeUnit.MILLISECONDS.sleep(PAUSE_MS);
      }
    }
    producer.shutdown();
  }

  private static void transact(String nameServers, String topic, int seconds) throws Exception {
    TransactionMQProducer producer = new TransactionMQProducer("interop-transactions", hook());
    producer.setNamesrvAddr(nameServers);
    producer.setPollNameServerInterval(ROUTE_INTERVAL_MS);
    producer.setHeartbeatBrokerInterval(ROUTE_INTERVAL_MS);
    producer.setTransactionListener(
        new TransactionListener() {
          @Override
          public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            return switch (numberOf(message) % 4) {
              case 0 -> LocalTransactionState.COMMIT_MESSAGE;
              case 1 -> LocalTransactionState.ROLLBACK_MESSAGE;
              default -> LocalTransactionState.UNKNOW;
            };
          }

          @Override
          public LocalTransactionState checkLocalTransaction(MessageExt message) {
            boolean commit = numberOf(message) % 2 == 0;
            return commit ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
          }
        });
    producer.start();
    long begin = System.currentTimeMillis();
    for (int number = 0; System.currentTimeMillis() - begin < seconds * 1000L; number++) {
      try {
        Message message = new Message(topic, Integer.toString(number).getBytes(StandardCharsets.UTF_8));
        SendResult result = producer.sendMessageInTransaction(message, null);
        if (result.getSendStatus() == SendStatus.SEND_OK) {
          System.out.println("> " + number + " " + System.currentTimeMillis());
        }
      } catch (Exception error) {
        TimeUnit.MILLISECONDS.sleep(PAUSE_MS);
      }
    }
    System.out.println("> done 0");
    System.out.flush();
    System.in.transferTo(OutputStream.nullOutputStream());
    producer.shutdown();
  }

  private static void sql(String nameServers, String topic, int count, String condition) throws Exception {
    DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("interop-sql", hook(), new AllocateMessageQueueAveragely());
    consumer.setNamesrvAddr(nameServers);
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

  private static int numberOf(Message message) {
    return Integer.parseInt(new String(message.getBody(), StandardCharsets.UTF_8));
  }

  private static void share(String nameServers, String topic) throws Exception {
    DefaultMQPushConsumer consumer =
        new DefaultMQPushConsumer("interop-consumers", hook(), new AllocateMessageQueueAveragely());
    consumer.setNamesrvAddr(nameServers);
    consumer.setPollNameServerInterval(ROUTE_INTERVAL_MS);
    consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
    consumer.subscribe(topic, "*");
    consumer.registerMessageListener(
        (MessageListenerConcurrently)
            (messages, context) -> {
              for (MessageExt one : messages) {
                String place = one.getBrokerName() + one.getQueueId();
                System.out.println("> " + new String(one.getBody(), StandardCharsets.UTF_8) + " " + place);
              }
              return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
    consumer.start();
    System.in.transferTo(OutputStream.nullOutputStream());
    consumer.shutdown();
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
