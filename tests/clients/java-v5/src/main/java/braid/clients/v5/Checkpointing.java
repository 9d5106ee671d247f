package braid.clients.v5;

import static braid.clients.v5.World.need;

import java.time.Duration;
import java.util.List;
import java.util.Map;
import org.apache.pulsar.client.api.v5.Checkpoint;
import org.apache.pulsar.client.api.v5.CheckpointConsumer;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.Producer;

/** Promises to checkpoint consumers. This client reads children beside their parents, so only completeness is asked of it. */
final class Checkpointing {
    private Checkpointing() {
    }

    /** Splits and merges under a running consumer; another one goes on from its checkpoint. */
    static void churn(World world) throws Exception {
        String topic = world.scalable("checkpoint", 2);
        Received received = new Received();
        byte[] place;
        Map<String, Integer> sent;
        try (Producer<byte[]> producer = world.unbatched(topic)) {
            Load load = Load.start(producer);
            try (CheckpointConsumer<byte[]> consumer = world.checkpoints(topic, Checkpoint.earliest()).create()) {
                Background churn = Background.start(() -> world.churn(topic, 2, 300));
                while (churn.isRunning()) {
                    Message<byte[]> message = consumer.receive(Duration.ofMillis(100));
                    if (message != null) {
                        received.take(message);
                    }
                }
                place = consumer.checkpoint().toByteArray();
            }
            int before = received.count();
            need(before > 0, "nothing came before the checkpoint");
            need(received.repeated() == 0, "%d messages came twice before the checkpoint", received.repeated());
            world.churn(topic, 1, 200);
            sent = load.stop();
            try (CheckpointConsumer<byte[]> consumer = world.checkpoints(topic, Checkpoint.fromByteArray(place)).create()) {
                while (received.count() < Load.total(sent)) {
                    Message<byte[]> message = consumer.receive(World.PATIENT);
                    need(message != null, "both consumers got %d of %d", received.count(), Load.total(sent));
                    received.take(message);
                }
            }
            received.needAll(sent, "both consumers");
            world.note("%d messages, %d of them before the checkpoint; %d again after it", received.count(), before,
                    received.repeated());
        }
    }

    /** At the latest message: only what is sent afterwards. */
    static void latest(World world) throws Exception {
        String topic = world.scalable("checkpoint-latest", 2);
        Received received = new Received();
        try (Producer<byte[]> producer = world.unbatched(topic)) {
            Load.send(producer, 100);
            try (CheckpointConsumer<byte[]> consumer = world.checkpoints(topic, Checkpoint.latest()).create()) {
                need(consumer.receive(World.SILENT) == null, "an old message came");
                producer.newMessage().key("new").value(Received.value("new", 0)).send();
                Message<byte[]> message = consumer.receive(World.PATIENT);
                need(message != null, "the new message did not come");
                received.take(message);
            }
        }
        received.needAll(Map.of("new", 1), "the consumer");
    }

    /** Two consumers of a group read disjoint segments, across a split and a merge. */
    static void group(World world) throws Exception {
        String topic = world.scalable("group", 4);
        Received received = new Received();
        int[] counts = {0, 0};
        try (Producer<byte[]> producer = world.unbatched(topic);
                CheckpointConsumer<byte[]> one = member(world, topic, "one");
                CheckpointConsumer<byte[]> two = member(world, topic, "two")) {
            List<CheckpointConsumer<byte[]>> both = List.of(one, two);
            Load load = Load.start(producer);
            Background churn = Background.start(() -> world.churn(topic, 1, 500));
            Map<String, Integer> sent = null;
            int quiet = 0;
            while (sent == null || received.count() < Load.total(sent)) {
                if (sent == null && !churn.isRunning()) {
                    sent = load.stop();
                }
                boolean isQuiet = true;
                for (int index = 0; index < 2; index++) {
                    Message<byte[]> message = both.get(index).receive(Duration.ofMillis(5));
                    if (message != null) {
                        received.take(message);
                        counts[index]++;
                        isQuiet = false;
                    }
                }
                quiet = isQuiet && sent != null ? quiet + 1 : 0;
                need(quiet < 2000, "the group got %d of %d", received.count(), sent == null ? -1 : Load.total(sent));
            }
            received.needAll(sent, "the group");
            need(counts[0] > 0 && counts[1] > 0, "the members got %d and %d", counts[0], counts[1]);
            world.note("%d and %d messages, %d twice", counts[0], counts[1], received.repeated());
        }
    }

    private static CheckpointConsumer<byte[]> member(World world, String topic, String name) throws Exception {
        return world.checkpoints(topic, Checkpoint.earliest()).consumerGroup("readers").consumerName(name).create();
    }
}
