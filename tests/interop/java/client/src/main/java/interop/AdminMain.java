package interop;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.tools.command.MQAdminStartup;
import org.apache.rocketmq.tools.command.SubCommand;

/**
 * mqadmin, again and again: each line of the input is a command, its words separated by tabs. Whatever it prints, errors
 * too, is followed by a line with nothing but the control character 4. The command {@code names} prints the names of all.
 */
public final class AdminMain extends MQAdminStartup {
  private AdminMain() {}

  public static void main(String[] ignored) {
    PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    System.setOut(out);
    System.setErr(out);
    BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line : (Iterable<String>) commands.lines()::iterator) {
      subCommandList.clear(); // every call adds all of them
      if (line.equals("names")) {
        initCommand();
        for (SubCommand one : subCommandList) {
          out.println(one.commandName());
        }
      } else {
        main0(line.split("\t"), null);
      }
      out.println("\u0004");
    }
    System.exit(0); // a command's threads may go on
  }
}
