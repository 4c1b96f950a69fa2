package interop;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** mqadmin 5, again and again, as AdminMain does with that of RocketMQ 4. */
public final class Admin5Main extends MQAdminStartup {
  private Admin5Main() {}

  public static void main(String[] ignored) {
    PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    System.setOut(out);
    System.setErr(out);
    BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line : (Iterable<String>) commands.lines()::iterator) {
      SUB_COMMANDS.clear(); // every call adds all of them
      main0(line.split("\t"), null);
      out.println("\u0004");
    }
    System.exit(0); // a command's threads may go on
  }
}
