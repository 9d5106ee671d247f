"""Share work among consumers, try again what failed, and put aside what keeps failing. Without `await`, in plain Python.

Start a broker first: `braid standalone`. Then: `python examples/work_queue.py [pulsar://localhost:6650] [http://localhost:8080]`.
"""

from __future__ import annotations

import sys

from braid.client.blocking import AdminClient, connect
from braid.client.dead_letters import DeadLetterPolicy

TOPIC = "topic://public/default/example-mails"
LETTERS = "topic://public/default/example-mails-failed"
MAILS = 20


class MailboxFull(Exception):
    """What the mail server says of some."""


def deliver(address: str) -> None:
    if address.endswith("@full.example"):
        raise MailboxFull(address)


def main(url: str, admin_url: str) -> None:
    policy = DeadLetterPolicy(max_redeliveries=2, topic=LETTERS)
    with AdminClient(admin_url) as admin, connect(url) as client:
        admin.scalable_topics.create(TOPIC, segments=2)
        with (
            client.queue_consumer(TOPIC, "mailer", initial="earliest", schema=str, dead_letter=policy) as consumer,
            client.queue_consumer(LETTERS, "office", initial="earliest", schema=str) as office,
        ):
            with client.producer(TOPIC, schema=str) as producer:
                for number in range(MAILS):
                    producer.send_nowait(f"user-{number}@{'full' if number % 5 == 0 else 'good'}.example")
            delivered = 0
            attempts = 0
            while delivered < MAILS * 4 // 5 or attempts < MAILS // 5 * 3:
                message = consumer.receive(timeout=10)
                try:
                    deliver(message.value)
                except MailboxFull:
                    attempts += 1
                    consumer.negative_acknowledge(message)  # comes again, each time later
                else:
                    delivered += 1
                    consumer.acknowledge(message)
            failed = []
            for _ in range(MAILS // 5):
                letter = office.receive(timeout=10)
                failed.append(letter.value)
                office.acknowledge(letter)
        print(f"{delivered} mails delivered; after {attempts} attempts put aside: {', '.join(sorted(failed))}")
        for topic in (TOPIC, LETTERS):
            admin.scalable_topics.delete(topic, force=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    main(*given, *["pulsar://localhost:6650", "http://localhost:8080"][len(given) :])
