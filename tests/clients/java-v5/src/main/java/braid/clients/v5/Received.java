package braid.clients.v5;

import static braid.clients.v5.World.need;

import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Map;
import java.util.Set;
import org.apache.pulsar.client.api.v5.Message;

/** What came, by key: counts, repetitions and steps back. Messages are `key:number`, numbered per key from 0. */
final class Received {
    private final Map<String, Integer> last = new HashMap<>();
    private final Map<String, Set<Integer>> numbers = new HashMap<>();
    private int count;
    private int repeated;
    private int stepsBack;

    static byte[] value(String key, int number) {
        return (key + ":" + number).getBytes(StandardCharsets.UTF_8);
    }

    /** Note a message; returns its number. */
    synchronized int take(Message<byte[]> message) {
        String[] parts = new String(message.value(), StandardCharsets.UTF_8).split(":");
        need(message.key().orElse("").equals(parts[0]), "the key of %s:%s is %s", parts[0], parts[1], message.key());
        int number = Integer.parseInt(parts[1]);
        if (numbers.computeIfAbsent(parts[0], key -> new HashSet<>()).add(number)) {
            count++;
            stepsBack += number < last.getOrDefault(parts[0], -1) ? 1 : 0;
            last.merge(parts[0], number, Math::max);
        } else {
            repeated++;
        }
        return number;
    }

    /** Messages, repetitions not counted. */
    synchronized int count() {
        return count;
    }

    synchronized int repeated() {
        return repeated;
    }

    /** Messages that came after a later one of their key. */
    synchronized int stepsBack() {
        return stepsBack;
    }

    /** Everything that was sent has come. */
    synchronized void needAll(Map<String, Integer> sent, String who) {
        for (Map.Entry<String, Integer> each : sent.entrySet()) {
            int came = numbers.getOrDefault(each.getKey(), Set.of()).size();
            need(came == each.getValue(), "%s: %d of %d messages with key %s came", who, came, each.getValue(), each.getKey());
        }
    }

    /** Every key came in the order sent, and nothing twice. */
    synchronized void needOrder(String who) {
        need(stepsBack == 0, "%s: %d messages came after a later one of their key", who, stepsBack);
        need(repeated == 0, "%s: %d messages came twice", who, repeated);
    }
}
