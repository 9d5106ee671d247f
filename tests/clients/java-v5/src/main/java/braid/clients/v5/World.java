package braid.clients.v5;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import org.apache.pulsar.client.api.v5.Checkpoint;
import org.apache.pulsar.client.api.v5.CheckpointConsumer;
import org.apache.pulsar.client.api.v5.CheckpointConsumerBuilder;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.ProducerBuilder;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.PulsarClientException;
import org.apache.pulsar.client.api.v5.QueueConsumerBuilder;
import org.apache.pulsar.client.api.v5.StreamConsumerBuilder;
import org.apache.pulsar.client.api.v5.config.BatchingPolicy;
import org.apache.pulsar.client.api.v5.config.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** What a check works with: the client, names for topics, and the driver that can do what a client cannot. */
final class World {
    static final Duration PATIENT = Duration.ofSeconds(20);
    static final Duration SILENT = Duration.ofMillis(700);

    final PulsarClient client;
    final String url;
    private final String prefix;
    private final BufferedReader driver;
    private final StringBuilder notes = new StringBuilder();

    World(PulsarClient client, String url, String prefix) {
        this(client, url, prefix.substring(prefix.indexOf("://")),
                new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8)));
    }

    private World(PulsarClient client, String url, String prefix, BufferedReader driver) {
        this.client = client;
        this.url = url;
        this.prefix = prefix;
        this.driver = driver;
    }

    /** The same with another client. */
    World with(PulsarClient other) {
        return new World(other, url, prefix, driver);
    }

    /** A promise that does not hold. */
    static final class Broken extends RuntimeException {
        Broken(String why) {
            super(why);
        }
    }

    /** An active segment of a layout. */
    record Segment(long id, int start, int end) {
    }

    static void need(boolean holds, String why, Object... arguments) {
        if (!holds) {
            throw new Broken(String.format(why, arguments));
        }
    }

    /** Say something about the check that is running; it stands behind its result. */
    synchronized void note(String text, Object... arguments) {
        notes.append("; ").append(String.format(text, arguments));
    }

    synchronized String takeNotes() {
        String all = notes.toString();
        notes.setLength(0);
        return all;
    }

    String regular(String name) {
        return "persistent" + prefix + "-" + name;
    }

    /** A new scalable topic. This client routes keys by the low half of the hash, so the topic is told to. */
    String scalable(String name, int segments) throws IOException {
        String topic = "topic" + prefix + "-" + name;
        ask("scalable " + topic + " " + segments);
        return topic;
    }

    /** Have the driver do something; returns what it answers. */
    synchronized String ask(String request) throws IOException {
        System.out.println("do " + request);
        String line = driver.readLine();
        need(line != null && line.startsWith("done"), "%s: %s", request, line);
        return line.substring("done".length()).trim();
    }

    /** The active segments in order of their ranges. */
    List<Segment> layout(String topic) throws IOException {
        List<Segment> segments = new ArrayList<>();
        for (String each : ask("layout " + topic).split(" ")) {
            String[] parts = each.split("[:-]");
            segments.add(new Segment(Long.parseLong(parts[0]), Integer.parseInt(parts[1], 16), Integer.parseInt(parts[2], 16)));
        }
        return segments;
    }

    void splitWidest(String topic) throws IOException {
        Segment widest = layout(topic).stream().max((a, b) -> Integer.compare(a.end() - a.start(), b.end() - b.start())).get();
        ask("split " + topic + " " + widest.id());
    }

    void mergeFirst(String topic) throws IOException {
        List<Segment> segments = layout(topic);
        ask("merge " + topic + " " + segments.get(0).id() + " " + segments.get(1).id());
    }

    /** Some splits, then as many merges, with a pause after each. */
    void churn(String topic, int rounds, long pauseMs) throws Exception {
        for (int round = 0; round < rounds; round++) {
            Thread.sleep(pauseMs);
            splitWidest(topic);
        }
        for (int round = 0; round < rounds; round++) {
            Thread.sleep(pauseMs);
            mergeFirst(topic);
        }
        Thread.sleep(pauseMs);
    }

    ProducerBuilder<byte[]> producer(String topic) {
        return client.newProducer(Schema.bytes()).topic(topic).blockIfQueueFull(true).sendTimeout(Duration.ofSeconds(30));
    }

    Producer<byte[]> unbatched(String topic) throws PulsarClientException {
        return producer(topic).batchingPolicy(BatchingPolicy.ofDisabled()).create();
    }

    StreamConsumerBuilder<byte[]> stream(String topic, String subscription, String name) {
        return client.newStreamConsumer(Schema.bytes()).topic(topic).subscriptionName(subscription).consumerName(name)
                .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST);
    }

    QueueConsumerBuilder<byte[]> queue(String topic, String subscription) {
        return client.newQueueConsumer(Schema.bytes()).topic(topic).subscriptionName(subscription)
                .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST);
    }

    CheckpointConsumerBuilder<byte[]> checkpoints(String topic, Checkpoint start) {
        return client.newCheckpointConsumer(Schema.bytes()).topic(topic).startPosition(start);
    }

    /** Everything in a topic, read without a subscription until it is silent. */
    Received readAll(String topic, int atLeast) throws PulsarClientException {
        Received received = new Received();
        try (CheckpointConsumer<byte[]> consumer = checkpoints(topic, Checkpoint.earliest()).create()) {
            while (true) {
                var message = consumer.receive(received.count() < atLeast ? PATIENT : SILENT);
                if (message == null) {
                    return received;
                }
                received.take(message);
            }
        }
    }
}
