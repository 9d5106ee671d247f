package braid.clients;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.ConsumerBuilder;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;

/** What a check works with: the client, names for topics, and the driver that can do what a client cannot. */
final class World {
    final PulsarClient client;
    final String url;
    private final String prefix;
    private final BufferedReader driver;

    World(PulsarClient client, String url, String prefix) {
        this(client, url, prefix, new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8)));
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

    static void need(boolean holds, String why, Object... arguments) {
        if (!holds) {
            throw new Broken(String.format(why, arguments));
        }
    }

    String topic(String name) {
        return prefix + "-" + name;
    }

    /** Have the driver do something; returns what it answers. */
    String ask(String request) throws IOException {
        System.out.println("do " + request);
        String line = driver.readLine();
        need(line != null && line.startsWith("done"), "%s: %s", request, line);
        return line.substring("done".length()).trim();
    }

    ProducerBuilder<byte[]> producer(String topic) {
        return client.newProducer().topic(topic).maxPendingMessages(1000).blockIfQueueFull(true);
    }

    ProducerBuilder<byte[]> batching(String topic, int messages) {
        return producer(topic).enableBatching(true).batchingMaxMessages(messages)
                .batchingMaxPublishDelay(20, TimeUnit.MILLISECONDS);
    }

    ConsumerBuilder<byte[]> consumer(String topic, String subscription) {
        return consumer(Schema.BYTES, topic, subscription);
    }

    <T> ConsumerBuilder<T> consumer(Schema<T> schema, String topic, String subscription) {
        return client.newConsumer(schema).topic(topic).subscriptionName(subscription)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest);
    }
}
