package main

import (
	"context"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

func transactionChecks() []namedCheck {
	return []namedCheck{
		{"txn-commit", func(w *World) { endAll(w, "txn-commit", true) }},
		{"txn-abort", func(w *World) { endAll(w, "txn-abort", false) }},
		{"txn-ended", useEnded},
		{"txn-conflict", ackConflict},
		{"txn-timeout", timeout},
		{"txn-restart", restartInside},
	}
}

// begin opens a transaction on a client that has them enabled.
func begin(client pulsar.Client, timeout time.Duration) pulsar.Transaction {
	txn, err := client.NewTransaction(timeout)
	must(err, "new transaction")
	need(txn.GetState() == pulsar.TxnOpen, "a new transaction is in state %v", txn.GetState())
	return txn
}

func sendIn(producer pulsar.Producer, number int, txn pulsar.Transaction) error {
	made := message(number)
	made.Transaction = txn
	_, err := producer.Send(context.Background(), made)
	return err
}

// withTransactions runs a check on a world of its own whose client can begin transactions.
func (w *World) withTransactions(check func(*World)) {
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: w.url, OperationTimeout: 30 * time.Second, EnableTransaction: true})
	must(err, "client with transactions")
	defer client.Close()
	check(&World{client: client, url: w.url, prefix: w.prefix, driver: w.driver})
}

// endAll reads, writes to a plain and a partitioned topic, and acknowledges what it read, all in one transaction.
func endAll(w *World, name string, isCommit bool) {
	const total = 60
	w.withTransactions(func(w *World) {
		input, plain, parted := w.topic(name+"-in"), w.topic(name+"-out"), w.topic(name+"-parts")
		w.ask("partitions " + parted + " 3")
		feeder := w.producer(pulsar.ProducerOptions{Topic: input, DisableBatching: true})
		send(feeder, total)
		feeder.Close()
		reading := pulsar.ConsumerOptions{Topic: input, SubscriptionName: "reading", Type: pulsar.Shared}
		consumer := w.consumer(reading)
		one := w.consumer(pulsar.ConsumerOptions{Topic: plain, SubscriptionName: "out"})
		defer one.Close()
		other := w.consumer(pulsar.ConsumerOptions{Topic: parted, SubscriptionName: "out"})
		defer other.Close()
		producer := w.producer(pulsar.ProducerOptions{Topic: plain, DisableBatching: true})
		defer producer.Close()
		spread := w.producer(pulsar.ProducerOptions{Topic: parted, BatchingMaxPublishDelay: 5 * time.Millisecond})
		defer spread.Close()

		txn := begin(w.client, time.Minute)
		for range total {
			m := receive(consumer)
			number := numberOf(m)
			must(sendIn(producer, number, txn), "send to the plain topic")
			must(sendIn(spread, number, txn), "send to the partitioned topic")
			must(consumer.AckWithTxn(m, txn), "ack in the transaction")
		}
		_, err := producer.Send(context.Background(), message(total))
		must(err, "plain send behind an open transaction")
		nothing(one, "before the end")
		nothing(other, "before the end")
		if isCommit {
			must(txn.Commit(context.Background()), "commit")
			need(txn.GetState() == pulsar.TxnCommitted, "a committed transaction is in state %v", txn.GetState())
		} else {
			must(txn.Abort(context.Background()), "abort")
			need(txn.GetState() == pulsar.TxnAborted, "an aborted transaction is in state %v", txn.GetState())
		}
		first := total
		if isCommit {
			first = 0
			seen := map[int]bool{}
			for range total {
				seen[numberOf(receive(other))] = true
			}
			need(len(seen) == total, "%d different messages came from the partitions", len(seen))
		}
		for number := first; number <= total; number++ {
			m := receive(one)
			need(numberOf(m) == number, "%d came when %d was due", numberOf(m), number)
		}
		nothing(one, "after everything")
		nothing(other, "after everything")
		if isCommit {
			nothing(consumer, "inputs after the commit")
		} else {
			seen := map[int]bool{}
			for range total {
				m := receive(consumer)
				seen[numberOf(m)] = true
				must(consumer.Ack(m), "plain ack")
			}
			need(len(seen) == total, "%d different inputs came again", len(seen))
		}
		consumer.Close()
		consumer = w.consumer(reading)
		nothing(consumer, "inputs at a new consumer")
		consumer.Close()
	})
}

// useEnded sends, acknowledges and ends after the end: refused, and without effect.
func useEnded(w *World) {
	w.withTransactions(func(w *World) {
		topic := w.topic("txn-ended")
		producer := w.producer(pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
		defer producer.Close()
		for _, isCommit := range []bool{true, false} {
			txn := begin(w.client, time.Minute)
			must(sendIn(producer, 0, txn), "send")
			if isCommit {
				must(txn.Commit(context.Background()), "commit")
				need(txn.Abort(context.Background()) != nil, "an abort after the commit succeeded")
			} else {
				must(txn.Abort(context.Background()), "abort")
				need(txn.Commit(context.Background()) != nil, "a commit after the abort succeeded")
			}
			need(sendIn(producer, 1, txn) != nil, "a send after the end succeeded")
		}
		_, err := producer.Send(context.Background(), message(2))
		must(err, "plain send after refused ones")
		consumer := w.consumer(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "all"})
		defer consumer.Close()
		for _, number := range []int{0, 2} {
			m := receive(consumer)
			need(numberOf(m) == number, "%d came when %d was due", numberOf(m), number)
		}
		nothing(consumer, "after everything")
	})
}

// ackConflict acknowledges one message in two transactions: the second is refused.
func ackConflict(w *World) {
	w.withTransactions(func(w *World) {
		topic := w.topic("txn-conflict")
		producer := w.producer(pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
		defer producer.Close()
		send(producer, 1)
		consumer := w.consumer(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "some", Type: pulsar.Shared})
		defer consumer.Close()
		m := receive(consumer)
		first, second := begin(w.client, time.Minute), begin(w.client, time.Minute)
		must(consumer.AckWithTxn(m, first), "ack in the first transaction")
		need(consumer.AckWithTxn(m, second) != nil, "an ack of a message that another transaction holds succeeded")
		must(first.Commit(context.Background()), "commit")
		_ = second.Abort(context.Background()) // the client may have given it up by itself
		nothing(consumer, "after the commit")
	})
}

// timeout lets a transaction run out: it is aborted, and what is behind it comes.
func timeout(w *World) {
	w.withTransactions(func(w *World) {
		topic := w.topic("txn-timeout")
		producer := w.producer(pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
		defer producer.Close()
		txn := begin(w.client, 2*time.Second)
		must(sendIn(producer, 0, txn), "send")
		_, err := producer.Send(context.Background(), message(1))
		must(err, "plain send")
		consumer := w.consumer(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "all"})
		defer consumer.Close()
		m := receive(consumer)
		need(numberOf(m) == 1, "%d came when 1 was due", numberOf(m))
		need(txn.Commit(context.Background()) != nil, "a transaction that had timed out was committed")
	})
}

// restartInside has the broker killed inside an open transaction, which then commits.
func restartInside(w *World) {
	const total = 20
	w.withTransactions(func(w *World) {
		input, output := w.topic("txn-restart-in"), w.topic("txn-restart-out")
		feeder := w.producer(pulsar.ProducerOptions{Topic: input, DisableBatching: true})
		send(feeder, total)
		feeder.Close()
		reading := pulsar.ConsumerOptions{Topic: input, SubscriptionName: "reading", Type: pulsar.Shared}
		consumer := w.consumer(reading)
		producer := w.producer(pulsar.ProducerOptions{Topic: output, DisableBatching: true})
		defer producer.Close()
		reader := w.consumer(pulsar.ConsumerOptions{Topic: output, SubscriptionName: "all"})
		defer reader.Close()
		txn := begin(w.client, time.Minute)
		for number := range total {
			m := receive(consumer)
			must(sendIn(producer, number, txn), "send")
			must(consumer.AckWithTxn(m, txn), "ack")
			if number == total/2 {
				consumer.Close()
				w.ask("restart")
				nothing(reader, "after the restart")
				consumer = w.consumer(reading)
			}
		}
		must(txn.Commit(context.Background()), "commit")
		for number := range total {
			m := receive(reader)
			need(numberOf(m) == number, "%d came when %d was due", numberOf(m), number)
		}
		consumer.Close()
		consumer = w.consumer(reading)
		defer consumer.Close()
		nothing(consumer, "inputs after the commit")
	})
}
