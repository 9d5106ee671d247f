package braid.clients.v5;

import static braid.clients.v5.World.need;

import java.time.Duration;
import java.util.List;
import java.util.Map;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.StreamConsumer;

/** Promises to stream consumers. */
final class Streaming {
    private static final long HAND_OVER_SECONDS = 15;

    private Streaming() {
    }

    /** Splits and merges under a running producer and consumer: nothing is lost or doubled, every key in order. */
    static void churn(World world) throws Exception {
        String topic = world.scalable("stream", 2);
        Received received = new Received();
        try (Producer<byte[]> producer = world.unbatched(topic);
                StreamConsumer<byte[]> consumer = world.stream(topic, "s", "one").subscribe()) {
            Load load = Load.start(producer);
            Background churn = Background.start(() -> world.churn(topic, 3, 300));
            while (churn.isRunning()) {
                take(consumer, received, 1);
            }
            Map<String, Integer> sent = load.stop();
            int total = Load.total(sent);
            while (received.count() < total) {
                need(take(consumer, received, 20) > 0, "the consumer got %d of %d", received.count(), total);
            }
            received.needAll(sent, "the consumer");
            received.needOrder("the consumer");
            need(consumer.receive(World.SILENT) == null, "a message came after the last");
            world.note("%d messages, 3 splits, 3 merges", total);
        }
        try (StreamConsumer<byte[]> consumer = world.stream(topic, "s", "one").subscribe()) {
            need(consumer.receive(World.SILENT) == null, "an acknowledged message came again");
        }
    }

    /** Two consumers share the segments, before and after the layout changes. */
    static void share(World world) throws Exception {
        String topic = world.scalable("share", 2);
        Received received = new Received();
        int[] counts = {0, 0};
        try (Producer<byte[]> producer = world.unbatched(topic);
                StreamConsumer<byte[]> one = world.stream(topic, "s", "one").subscribe();
                StreamConsumer<byte[]> two = world.stream(topic, "s", "two").subscribe()) {
            List<StreamConsumer<byte[]>> both = List.of(one, two);
            Load load = Load.start(producer);
            Background churn = Background.start(() -> world.churn(topic, 2, 400));
            Map<String, Integer> sent = null;
            int quiet = 0;
            while (quiet < 20) {
                if (sent == null && !churn.isRunning()) {
                    sent = load.stop();
                }
                int came = 0;
                for (int index = 0; index < 2; index++) {
                    int some = take(both.get(index), received, 0);
                    counts[index] += some;
                    came += some;
                }
                if (sent != null && received.count() == Load.total(sent)) {
                    break;
                }
                if (came == 0) {
                    Thread.sleep(sent == null ? 1 : 500);
                    quiet += sent == null ? 0 : 1;
                }
            }
            received.needAll(sent, "both consumers");
            received.needOrder("both consumers");
            need(counts[0] > 0 && counts[1] > 0, "the consumers got %d and %d", counts[0], counts[1]);
            world.note("%d and %d messages", counts[0], counts[1]);
        }
    }

    /** A consumer that closes while its client lives on gives its segments to a successor under another name soon. */
    static void successor(World world) throws Exception {
        String topic = world.scalable("successor", 4);
        Received received = new Received();
        Map<String, Integer> sent;
        try (Producer<byte[]> producer = world.unbatched(topic)) {
            sent = Load.send(producer, 800);
        }
        StreamConsumer<byte[]> first = world.stream(topic, "s", "first").subscribe();
        while (received.count() < 300) {
            need(take(first, received, 20) > 0, "the first consumer got %d", received.count());
        }
        Thread.sleep(300); // its acknowledgments go out in groups
        int before = received.count();
        first.close();
        long began = System.nanoTime();
        try (StreamConsumer<byte[]> second = world.stream(topic, "s", "second").subscribe()) {
            while (received.count() < 800 && (System.nanoTime() - began) / 1e9 < HAND_OVER_SECONDS) {
                take(second, received, 1);
            }
            double seconds = (System.nanoTime() - began) / 1e9;
            need(received.count() == 800, "%d of 800 messages after %.0f seconds", received.count(), seconds);
            received.needAll(sent, "both");
            need(received.stepsBack() == 0, "%d messages came out of order", received.stepsBack());
            world.note("%d, then the other %d after %.1f s, %d again", before, 800 - before, seconds, received.repeated());
        }
    }

    /** The broker is killed under a running consumer, which goes on in order. */
    static void restart(World world) throws Exception {
        String topic = world.scalable("restart", 2);
        Received received = new Received();
        try (Producer<byte[]> producer = world.unbatched(topic);
                StreamConsumer<byte[]> consumer = world.stream(topic, "s", "one").subscribe()) {
            Load load = Load.start(producer);
            Background events = Background.start(() -> {
                Thread.sleep(500);
                world.splitWidest(topic);
                // This client never repeats an acknowledgment that a crash took, and on a sealed segment no later one covers it.
                Thread.sleep(500);
                world.ask("restart");
                Thread.sleep(1000);
                world.splitWidest(topic);
                Thread.sleep(500);
            });
            while (events.isRunning()) {
                take(consumer, received, 1);
            }
            Map<String, Integer> sent = load.stop();
            int total = Load.total(sent);
            while (received.count() < total) {
                need(take(consumer, received, 30) > 0, "the consumer got %d of %d", received.count(), total);
            }
            received.needAll(sent, "the consumer");
            need(received.stepsBack() == 0, "%d messages came out of order", received.stepsBack());
            world.note("%d messages, %d again", total, received.repeated());
        }
    }

    /** On a topic with partitions: its partitions are its segments. */
    static void regular(World world) throws Exception {
        String topic = world.regular("stream-partitions");
        world.ask("partitions " + topic + " 3");
        Received received = new Received();
        try (Producer<byte[]> producer = world.unbatched(topic);
                StreamConsumer<byte[]> consumer = world.stream(topic, "s", "one").subscribe()) {
            Map<String, Integer> sent = Load.send(producer, 300);
            while (received.count() < 300) {
                need(take(consumer, received, 20) > 0, "the consumer got %d of 300", received.count());
            }
            received.needAll(sent, "the consumer");
            received.needOrder("the consumer");
        }
    }

    /** Receive what is there, in batches, and acknowledge the last of it; returns how many messages came. */
    private static int take(StreamConsumer<byte[]> consumer, Received received, int seconds) throws Exception {
        MessageId last = null;
        int came = 0;
        Message<byte[]> message = consumer.receive(Duration.ofMillis(seconds == 0 ? 10 : seconds * 1000L));
        while (message != null) {
            received.take(message);
            last = message.id();
            came++;
            message = came < 50 ? consumer.receive(Duration.ofMillis(1)) : null;
        }
        if (last != null) {
            consumer.acknowledgeCumulative(last);
        }
        return came;
    }
}
