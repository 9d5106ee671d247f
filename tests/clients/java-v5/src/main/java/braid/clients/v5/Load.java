package braid.clients.v5;

import static braid.clients.v5.World.need;

import java.util.Map;
import java.util.TreeMap;
import org.apache.pulsar.client.api.v5.Producer;

/** A thread that sends keyed, numbered messages one after the other until it is stopped. */
final class Load {
    static final int KEYS = 16;

    private final Producer<byte[]> producer;
    private final Map<String, Integer> sent = new TreeMap<>();
    private final Thread thread = new Thread(this::work, "load");
    private volatile boolean isStopped;
    private volatile Exception failure;

    private Load(Producer<byte[]> producer) {
        this.producer = producer;
        thread.start();
    }

    static Load start(Producer<byte[]> producer) {
        return new Load(producer);
    }

    /** End it; returns how many messages of each key were acknowledged. */
    Map<String, Integer> stop() throws Exception {
        isStopped = true;
        thread.join(60_000);
        need(!thread.isAlive(), "a send did not return within a minute");
        if (failure != null) {
            throw failure;
        }
        return sent;
    }

    static int total(Map<String, Integer> sent) {
        return sent.values().stream().mapToInt(Integer::intValue).sum();
    }

    /** Send so many messages at once; returns how many of each key. */
    static Map<String, Integer> send(Producer<byte[]> producer, int count) throws Exception {
        Map<String, Integer> sent = new TreeMap<>();
        for (int turn = 0; turn < count; turn++) {
            String key = "key-" + turn % KEYS;
            int number = sent.merge(key, 1, Integer::sum) - 1;
            producer.async().newMessage().key(key).value(Received.value(key, number)).send();
        }
        producer.async().flush().get();
        return sent;
    }

    private void work() {
        try {
            for (int turn = 0; !isStopped; turn++) {
                String key = "key-" + turn % KEYS;
                int number = sent.getOrDefault(key, 0);
                producer.newMessage().key(key).value(Received.value(key, number)).send();
                sent.put(key, number + 1);
                Thread.sleep(1);
            }
        } catch (Exception trouble) {
            failure = trouble;
        }
    }
}
