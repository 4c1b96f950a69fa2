package org.apache.rocketmq.test.base;

import java.util.ArrayList;
import java.util.List;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.test.client.rmq.RMQAsyncSendProducer;
import org.apache.rocketmq.test.client.rmq.RMQNormalConsumer;
import org.apache.rocketmq.test.client.rmq.RMQNormalProducer;
import org.apache.rocketmq.test.client.rmq.RMQTransactionalProducer;
import org.apache.rocketmq.test.clientinterface.AbstractMQConsumer;
import org.apache.rocketmq.test.clientinterface.AbstractMQProducer;
import org.apache.rocketmq.test.factory.ConsumerFactory;
import org.apache.rocketmq.test.listener.AbstractListener;
import org.apache.rocketmq.test.util.MQAdmin;
import org.apache.rocketmq.test.util.MQRandomUtils;

/**
 * Stands in the place of the class of this name in RocketMQ's tests, which starts servers of its own. The servers run
 * already: {@code -Dns=} is their name server, {@code -Dcluster=} their cluster, {@code -Dbrokers=a,b} the masters.
 */
public class BaseConf {
  private static final int TOPIC_QUEUES = 8;
  private static final long TOPIC_TIMEOUT_MS = 30_000;
  private static final String[] BROKERS = System.getProperty("brokers").split(",");

  public static String nsAddr = System.getProperty("ns");
  protected static String clusterName = System.getProperty("cluster");
  protected static String broker1Name = BROKERS[0];
  protected static String broker2Name = BROKERS[BROKERS.length - 1];
  protected static int brokerNum = BROKERS.length;
  protected static int waitTime = 5;
  protected static int consumeTime = Integer.getInteger("consumeTime", 60_000);
  protected static List<Object> mqClients = new ArrayList<>();
  protected static boolean debug = false;

  static {
    System.setProperty(RemotingCommand.REMOTING_VERSION_KEY, Integer.toString(MQVersion.CURRENT_VERSION));
  }

  public static String initTopic() {
    return initTopicWithName(MQRandomUtils.getRandomTopic());
  }

  public static String initTopicWithName(String topic) {
    long deadline = System.currentTimeMillis() + TOPIC_TIMEOUT_MS;
    while (!MQAdmin.createTopic(nsAddr, clusterName, topic, TOPIC_QUEUES)) {
      if (System.currentTimeMillis() > deadline) {
        throw new AssertionError("the topic " + topic + " could not be created");
      }
    }
    return topic;
  }

  public static String initConsumerGroup() {
    return initConsumerGroup(MQRandomUtils.getRandomConsumerGroup());
  }

  public static String initConsumerGroup(String group) {
    MQAdmin.createSub(nsAddr, clusterName, group);
    return group;
  }

  public static RMQNormalProducer getProducer(String nameServers, String topic) {
    return getProducer(nameServers, topic, false);
  }

  public static RMQNormalProducer getProducer(String nameServers, String topic, boolean useTls) {
    return kept(new RMQNormalProducer(nameServers, topic, useTls));
  }

  public static RMQNormalProducer getProducer(String nameServers, String topic, String group, String instance) {
    return kept(new RMQNormalProducer(nameServers, topic, group, instance));
  }

  public static RMQTransactionalProducer getTransactionalProducer(
      String nameServers, String topic, TransactionListener listener) {
    return kept(new RMQTransactionalProducer(nameServers, topic, false, listener));
  }

  public static RMQAsyncSendProducer getAsyncProducer(String nameServers, String topic) {
    return kept(new RMQAsyncSendProducer(nameServers, topic));
  }

  public static RMQNormalConsumer getConsumer(
      String nameServers, String topic, String expression, AbstractListener listener) {
    return getConsumer(nameServers, topic, expression, listener, false);
  }

  public static RMQNormalConsumer getConsumer(
      String nameServers, String topic, String expression, AbstractListener listener, boolean useTls) {
    return getConsumer(nameServers, initConsumerGroup(), topic, expression, listener, useTls);
  }

  public static RMQNormalConsumer getConsumer(
      String nameServers, String group, String topic, String expression, AbstractListener listener) {
    return getConsumer(nameServers, group, topic, expression, listener, false);
  }

  public static RMQNormalConsumer getConsumer(
      String nameServers, String group, String topic, String expression, AbstractListener listener, boolean useTls) {
    return kept(ConsumerFactory.getRMQNormalConsumer(nameServers, group, topic, expression, listener, useTls));
  }

  public static void shutdown() {
    for (Object client : mqClients) {
      if (client instanceof AbstractMQProducer producer) {
        producer.shutdown();
      } else {
        ((AbstractMQConsumer) client).shutdown();
      }
    }
  }

  private static <T> T kept(T client) {
    mqClients.add(client);
    return client;
  }
}
