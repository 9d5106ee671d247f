package braid.clients.v5;

import static braid.clients.v5.World.need;

import java.time.Duration;
import java.util.HashSet;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.config.BackoffPolicy;
import org.apache.pulsar.client.api.v5.config.DeadLetterPolicy;
import org.apache.pulsar.client.api.v5.config.SubscriptionInitialPosition;

/** Promises to queue consumers. */
final class Queueing {
    private static final BackoffPolicy SOON = BackoffPolicy.exponential(Duration.ofMillis(100), Duration.ofSeconds(1));

    private Queueing() {
    }

    /** Splits and merges under two consumers of which one refuses each tenth message once: everything is handled. */
    static void churn(World world) throws Exception {
        String topic = world.scalable("queue", 2);
        Received received = new Received();
        Set<String> refused = new HashSet<>();
        int redelivered = 0;
        try (Producer<byte[]> producer = world.unbatched(topic);
                QueueConsumer<byte[]> one = world.queue(topic, "q").negativeAckRedeliveryBackoff(SOON).subscribe();
                QueueConsumer<byte[]> two = world.queue(topic, "q").subscribe()) {
            Load load = Load.start(producer);
            Background churn = Background.start(() -> world.churn(topic, 3, 300));
            Map<String, Integer> sent = null;
            int quiet = 0;
            while (sent == null || received.count() < Load.total(sent)) {
                if (sent == null && !churn.isRunning()) {
                    sent = load.stop();
                }
                Message<byte[]> message = one.receive(Duration.ofMillis(5));
                if (message != null) {
                    String content = new String(message.value());
                    if (Integer.parseInt(content.split(":")[1]) % 10 == 7 && refused.add(content)) {
                        one.negativeAcknowledge(message.id());
                    } else {
                        received.take(message);
                        redelivered += message.redeliveryCount() > 0 ? 1 : 0;
                        one.acknowledge(message.id());
                    }
                }
                Message<byte[]> other = two.receive(Duration.ofMillis(5));
                if (other != null) {
                    received.take(other);
                    redelivered += other.redeliveryCount() > 0 ? 1 : 0;
                    two.acknowledge(other.id());
                }
                quiet = message == null && other == null && sent != null ? quiet + 1 : 0;
                need(quiet < 2000, "the consumers got %d of %d", received.count(), sent == null ? -1 : Load.total(sent));
            }
            received.needAll(sent, "both consumers");
            need(received.repeated() == 0, "%d messages came twice", received.repeated());
            need(redelivered >= refused.size(), "%d were refused, %d came with a count", refused.size(), redelivered);
            world.note("%d messages, %d refused once, 3 splits, 3 merges", received.count(), refused.size());
        }
        try (QueueConsumer<byte[]> consumer = world.queue(topic, "q").subscribe()) {
            Message<byte[]> message = consumer.receive(World.SILENT);
            need(message == null, "an acknowledged message came again");
        }
    }

    /** A message that is refused too often goes to the topic for dead letters, with its key and properties. */
    static void deadLetter(World world) throws Exception {
        String topic = world.scalable("dead", 2);
        String letters = world.scalable("dead-letters", 1);
        DeadLetterPolicy policy = DeadLetterPolicy.builder().maxRedeliverCount(2).deadLetterTopic(letters).build();
        try (Producer<byte[]> producer = world.unbatched(topic);
                QueueConsumer<byte[]> consumer = world.queue(topic, "q").negativeAckRedeliveryBackoff(SOON)
                        .deadLetterPolicy(policy).subscribe();
                QueueConsumer<byte[]> buried = world.queue(letters, "undertaker").subscribe()) {
            for (int number = 0; number < 20; number++) {
                producer.newMessage().key("k" + number).property("n", "" + number).value(Received.value("k" + number, 0)).send();
            }
            world.splitWidest(topic);
            Set<String> dead = new HashSet<>();
            Set<String> alive = new HashSet<>();
            for (int wait = 0; dead.size() < 5 || alive.size() < 15; wait++) {
                need(wait < 600, "%d letters are dead and %d handled", dead.size(), alive.size());
                Message<byte[]> message = consumer.receive(Duration.ofMillis(50));
                if (message != null && Integer.parseInt(message.properties().get("n")) % 4 == 0) {
                    consumer.negativeAcknowledge(message.id());
                } else if (message != null) {
                    need(alive.add(message.key().get()), "%s came twice", message.key());
                    consumer.acknowledge(message.id());
                }
                Message<byte[]> letter = buried.receive(Duration.ofMillis(10));
                if (letter != null) {
                    need(Integer.parseInt(letter.properties().get("n")) % 4 == 0, "%s is dead", letter.key());
                    need(letter.key().get().equals("k" + letter.properties().get("n")), "its key is %s", letter.key());
                    need(dead.add(letter.key().get()), "%s is dead twice", letter.key());
                    buried.acknowledge(letter.id());
                }
            }
            need(consumer.receive(World.SILENT) == null, "a message came after all were handled");
        }
    }

    /** A subscription at the latest message gets the first message of each child of a split, every time. */
    static void latest(World world) throws Exception {
        for (int round = 0; round < 12; round++) {
            String topic = world.scalable("latest-" + round, 1);
            Received received = new Received();
            Map<String, Integer> sent = new TreeMap<>();
            try (Producer<byte[]> producer = world.unbatched(topic)) {
                producer.newMessage().key("before").value(Received.value("before", 0)).send();
                try (QueueConsumer<byte[]> consumer = world.queue(topic, "q")
                        .subscriptionInitialPosition(SubscriptionInitialPosition.LATEST).subscribe()) {
                    world.splitWidest(topic);
                    for (int key = 0; key < 8; key++) {
                        producer.newMessage().key("k" + key).value(Received.value("k" + key, 0)).send();
                        sent.put("k" + key, 1);
                    }
                    while (received.count() < 8) {
                        Message<byte[]> message = consumer.receive(Duration.ofSeconds(10));
                        need(message != null, "round %d: %d of 8 messages came after the split", round, received.count());
                        received.take(message);
                        consumer.acknowledge(message.id());
                    }
                    received.needAll(sent, "round " + round);
                }
            }
        }
    }

    /** Producer and queue consumer on a topic that is not scalable: its partitions, or itself, are its segments. */
    static void regular(World world, int partitions) throws Exception {
        String topic = world.regular("queue-regular-" + partitions);
        if (partitions > 0) {
            world.ask("partitions " + topic + " " + partitions);
        }
        Received received = new Received();
        try (Producer<byte[]> producer = world.producer(topic).create();
                QueueConsumer<byte[]> consumer = world.queue(topic, "q").negativeAckRedeliveryBackoff(SOON).subscribe()) {
            Map<String, Integer> sent = Load.send(producer, 500);
            Set<String> refused = new HashSet<>();
            while (received.count() < 500) {
                Message<byte[]> message = consumer.receive(World.PATIENT);
                need(message != null, "the consumer got %d of 500", received.count());
                String content = new String(message.value());
                if (content.endsWith("7") && refused.add(content)) {
                    consumer.negativeAcknowledge(message.id());
                } else {
                    received.take(message);
                    consumer.acknowledge(message.id());
                }
            }
            received.needAll(sent, "the consumer");
        }
        try (QueueConsumer<byte[]> consumer = world.queue(topic, "q").subscribe()) {
            need(consumer.receive(World.SILENT) == null, "an acknowledged message came again");
        }
    }
}
