package braid.clients;

import static braid.clients.World.need;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClientException;

/** Numbered messages: made, sent, received and checked in all their parts. */
final class Messages {
    static final int COUNT = 2000;
    static final int PATIENT_SECONDS = 20;
    static final int SILENT_MS = 700;
    private static final String TEXT = "grün ✓";

    private Messages() {
    }

    static byte[] payload(int number) {
        return (String.format("message %06d ", number) + "braid ".repeat(number % 40)).getBytes(StandardCharsets.UTF_8);
    }

    static String keyOf(int number) {
        return "key-" + number % 7;
    }

    static CompletableFuture<MessageId> sendOne(Producer<byte[]> producer, int number) {
        return producer.newMessage().value(payload(number)).key(keyOf(number)).eventTime(1_000_000L + number)
                .property("number", Integer.toString(number)).property("text", TEXT).sendAsync();
    }

    /** Publish without waiting in between; returns the ids in order. */
    static List<MessageId> send(Producer<byte[]> producer, int total) throws Exception {
        List<CompletableFuture<MessageId>> waiting = new ArrayList<>();
        for (int number = 0; number < total; number++) {
            waiting.add(sendOne(producer, number));
        }
        producer.flush();
        List<MessageId> ids = new ArrayList<>();
        for (CompletableFuture<MessageId> each : waiting) {
            ids.add(each.get(PATIENT_SECONDS, TimeUnit.SECONDS));
        }
        for (int number = 1; number < total; number++) {
            need(ids.get(number - 1).compareTo(ids.get(number)) < 0, "the ids of %d and the next are out of order", number - 1);
        }
        return ids;
    }

    /** Check all parts of a message; returns its number. */
    static int numberOf(Message<byte[]> message) {
        int number = Integer.parseInt(message.getProperty("number"));
        need(Arrays.equals(message.getData(), payload(number)), "the payload of %d differs", number);
        need(message.getKey().equals(keyOf(number)), "the key of %d is %s", number, message.getKey());
        need(message.getProperty("text").equals(TEXT), "the properties of %d are %s", number, message.getProperties());
        need(message.getEventTime() == 1_000_000L + number, "the event time of %d is %d", number, message.getEventTime());
        return number;
    }

    static <T> Message<T> receive(Consumer<T> consumer) throws PulsarClientException {
        Message<T> message = consumer.receive(PATIENT_SECONDS, TimeUnit.SECONDS);
        need(message != null, "no message came on %s", consumer.getSubscription());
        return message;
    }

    /** Receive the message with this number. */
    static Message<byte[]> expect(Consumer<byte[]> consumer, int number, String when) throws PulsarClientException {
        Message<byte[]> message = receive(consumer);
        need(numberOf(message) == number, "%s: %d came when %d was due", when, numberOf(message), number);
        return message;
    }

    /** No further message comes. */
    static void nothing(Consumer<?> consumer, String when) throws PulsarClientException {
        Message<?> message = consumer.receive(SILENT_MS, TimeUnit.MILLISECONDS);
        need(message == null, "%s: a message came: %s", when, message == null ? "" : message.getMessageId());
    }
}
