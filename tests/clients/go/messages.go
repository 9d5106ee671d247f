package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

const (
	count   = 2000
	patient = 20 * time.Second
	silent  = 700 * time.Millisecond
)

func payload(number int) []byte {
	return []byte(fmt.Sprintf("message %06d ", number) + strings.Repeat("braid ", number%40))
}

func message(number int) *pulsar.ProducerMessage {
	return &pulsar.ProducerMessage{
		Payload:    payload(number),
		Key:        keyOf(number),
		Properties: map[string]string{"number": strconv.Itoa(number), "text": "grün ✓"},
		EventTime:  time.UnixMilli(int64(1_000_000 + number)),
	}
}

func keyOf(number int) string {
	return fmt.Sprintf("key-%d", number%7)
}

// numberOf checks all parts of a message and returns its number.
func numberOf(m pulsar.Message) int {
	number, err := strconv.Atoi(m.Properties()["number"])
	must(err, "property number")
	need(string(m.Payload()) == string(payload(number)), "payload of %d is %q", number, m.Payload())
	need(m.Key() == keyOf(number), "key of %d is %q", number, m.Key())
	need(m.Properties()["text"] == "grün ✓", "properties of %d are %v", number, m.Properties())
	need(m.EventTime().UnixMilli() == int64(1_000_000+number), "event time of %d is %v", number, m.EventTime())
	return number
}

func (w *World) producer(options pulsar.ProducerOptions) pulsar.Producer {
	producer, err := w.client.CreateProducer(options)
	must(err, "create producer")
	return producer
}

func (w *World) consumer(options pulsar.ConsumerOptions) pulsar.Consumer {
	options.SubscriptionInitialPosition = pulsar.SubscriptionPositionEarliest
	consumer, err := w.client.Subscribe(options)
	must(err, "subscribe "+options.SubscriptionName)
	return consumer
}

// send publishes `total` messages without waiting in between and returns their ids, in order.
func send(producer pulsar.Producer, total int) []pulsar.MessageID {
	ids := make([]pulsar.MessageID, total)
	problems := make(chan error, total)
	var waiting sync.WaitGroup
	waiting.Add(total)
	for number := range total {
		producer.SendAsync(context.Background(), message(number), func(id pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
			if err != nil {
				problems <- err
			}
			ids[number] = id
			waiting.Done()
		})
	}
	must(producer.FlushWithCtx(context.Background()), "flush")
	waiting.Wait()
	select {
	case err := <-problems:
		must(err, "send")
	default:
	}
	for number := 1; number < total; number++ {
		need(isBefore(ids[number-1], ids[number]), "id of %d is %v, of the next %v", number-1, ids[number-1], ids[number])
	}
	return ids
}

func isBefore(one, other pulsar.MessageID) bool {
	if one.LedgerID() != other.LedgerID() {
		return one.LedgerID() < other.LedgerID()
	}
	if one.EntryID() != other.EntryID() {
		return one.EntryID() < other.EntryID()
	}
	return one.BatchIdx() < other.BatchIdx()
}

func isSame(one, other pulsar.MessageID) bool {
	return one.LedgerID() == other.LedgerID() && one.EntryID() == other.EntryID() && one.BatchIdx() == other.BatchIdx()
}

func receive(consumer pulsar.Consumer) pulsar.Message {
	deadline, cancel := context.WithTimeout(context.Background(), patient)
	defer cancel()
	m, err := consumer.Receive(deadline)
	must(err, "receive on "+consumer.Subscription())
	return m
}

// nothing holds when no further message comes.
func nothing(consumer pulsar.Consumer, when string) {
	deadline, cancel := context.WithTimeout(context.Background(), silent)
	defer cancel()
	if m, err := consumer.Receive(deadline); err == nil {
		broken("%s: a message came: %s %v", when, m.Payload()[:14], m.ID())
	}
}

func next(reader pulsar.Reader) pulsar.Message {
	deadline, cancel := context.WithTimeout(context.Background(), patient)
	defer cancel()
	m, err := reader.Next(deadline)
	must(err, "read")
	return m
}
