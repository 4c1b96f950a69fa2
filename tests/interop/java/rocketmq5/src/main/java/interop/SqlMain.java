package interop;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.rocketmq.filter.SqlFilter;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.expression.Expression;

/**
 * What RocketMQ's SQL filter says: for each line of an expression and properties (name, value, name, value ...), separated by
 * tabs, one line: {@code T}, {@code F}, {@code N} (unknown, or an error while evaluating) or {@code R} (refused).
 */
public final class SqlMain {
  private SqlMain() {}

  public static void main(String[] arguments) throws IOException {
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    for (String line = in.readLine(); line != null; line = in.readLine()) {
      String[] parts = line.split("\t", -1);
      Map<String, Object> properties = new LinkedHashMap<>();
      for (int at = 1; at + 1 < parts.length; at += 2) {
        properties.put(parts[at], parts[at + 1]);
      }
      out.println("> " + verdict(parts[0], properties));
    }
    out.flush();
    System.exit(0);
  }

  private static String verdict(String text, Map<String, Object> properties) {
    Expression expression;
    try {
      expression = new SqlFilter().compile(text);
    } catch (Exception | Error refused) { // the lexer throws errors
      return "R";
    }
    try {
      Object result = expression.evaluate(new Context(properties));
      return result instanceof Boolean known ? (known ? "T" : "F") : "N";
    } catch (Exception error) {
      return "N";
    }
  }

  private record Context(Map<String, Object> properties) implements EvaluationContext {
    @Override
    public Object get(String name) {
      return properties.get(name);
    }

    @Override
    public Map<String, Object> keyValues() {
      return properties;
    }
  }
}
