package interop;

import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.rocketmq.spring.annotation.RocketMQMessageListener;
import org.apache.rocketmq.spring.core.RocketMQListener;
import org.apache.rocketmq.spring.core.RocketMQTemplate;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.context.ApplicationContext;
import org.springframework.context.ApplicationContextException;
import org.springframework.stereotype.Component;

/**
 * An application with Spring's starter: sends to a topic, once a second, until its listener got a message.
 *
 * <p>{@code NAMESERVER TOPIC}; prints the status of each send and the first message, in lines that begin with {@code >}.
 */
@SpringBootApplication
public class SpringMain {
  private static final int SENDS_MAX = 60;
  private static final int STARTS_MAX = 6;
  private static final CountDownLatch GOT = new CountDownLatch(1);
  private static final AtomicBoolean IS_FIRST = new AtomicBoolean(true);

  /** The application's consumer. */
  @Component
  @RocketMQMessageListener(topic = "${interop.topic}", consumerGroup = "spring-consumers")
  public static class Listener implements RocketMQListener<String> {
    @Override
    public void onMessage(String body) {
      if (IS_FIRST.getAndSet(false)) {
        System.out.println("> got " + body);
        GOT.countDown();
      }
    }
  }

  public static void main(String[] arguments) throws Exception {
    SpringApplication application = new SpringApplication(SpringMain.class);
    application.setDefaultProperties(Map.of(
        "rocketmq.name-server", arguments[0],
        "rocketmq.producer.group", "spring-producers",
        "interop.topic", arguments[1]));
    RocketMQTemplate template = started(application).getBean(RocketMQTemplate.class);
    for (int number = 0; number < SENDS_MAX && GOT.getCount() > 0; number++) {
      System.out.println("> sent " + template.syncSend(arguments[1] + ":blue", "hello").getSendStatus());
      GOT.await(1, TimeUnit.SECONDS);
    }
    System.exit(GOT.getCount() == 0 ? 0 : 1);
  }

  /** A name server that does not answer within 3 s, as on a busy machine, ends an application. */
  private static ApplicationContext started(SpringApplication application) {
    for (int tries = 1; ; tries++) {
      try {
        return application.run();
      } catch (ApplicationContextException error) {
        if (tries == STARTS_MAX) {
          throw error;
        }
      }
    }
  }
}
