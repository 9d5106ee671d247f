"""Rates of counters over the last ten seconds or so.

Owns the samples that rates are made of: each look at a counter is one, and the broker looks at those of its loaded topics every
few seconds (`sample`), so that somebody who asks once in an hour sees what happens now. What nobody looked at for longer has
the rate since the last look. Everything that shows rates uses the same object and the same keys, so that it shows the same.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import TYPE_CHECKING, Final

from braid.runtime.clock import Clock

if TYPE_CHECKING:
    from braid.broker.subscription import Subscription
    from braid.broker.topic import Topic

MAX_COUNTERS: Final = 100_000
MAX_SAMPLED_TOPICS: Final = 5_000
"""Of a broker with more, the rates of the others are those between two looks at them."""
SAMPLE_SECONDS: Final = 5.0
WINDOW_SECONDS: Final = 10.0
LEAST_SECONDS: Final = 1.0
"""Looks closer together than this see the rate of the last longer interval."""
SAMPLES: Final = 3
"""Enough for one at the beginning of the window."""


class _Counter:
    __slots__ = ("rate", "samples")

    def __init__(self, now: float, count: int) -> None:
        self.samples = deque([(now, count)], SAMPLES)
        self.rate = 0.0

    def look(self, now: float, count: int) -> None:
        last, _count = self.samples[-1]
        began, before = next((each for each in self.samples if now - each[0] <= WINDOW_SECONDS), self.samples[-1])
        if now - began >= LEAST_SECONDS:
            self.rate = (count - before) / (now - began)
        if now - last >= SAMPLE_SECONDS:
            self.samples.append((now, count))


class Rates:
    """Remembers some looks at each counter; bounded, the least recently seen is forgotten."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counters: OrderedDict[Hashable, _Counter] = OrderedDict()

    def per_second(self, key: Hashable, count: int) -> float:
        """The rate at which `count` grows; 0 at the first look and when it begins anew."""
        now = self._clock.monotonic()
        found = self._counters.get(key)
        if found is None or count < found.samples[-1][1]:
            found = self._counters[key] = _Counter(now, count)
            if len(self._counters) > MAX_COUNTERS:
                self._counters.popitem(last=False)
        else:
            found.look(now, count)
        self._counters.move_to_end(key)
        return found.rate

    def sample(self, topic: Topic) -> None:
        """Look at the counters of a topic and its clients."""
        look, name = self.per_second, str(topic.name)
        look((name, "in"), topic.messages_in)
        look((name, "bytes in"), topic.bytes_in)
        out = size = 0
        for producer in topic.producers.values():
            look((name, "producer", producer.info.name, "messages"), producer.messages_in)
            look((name, "producer", producer.info.name, "bytes"), producer.bytes_in)
        for each in topic.subscriptions.values():
            key = (name, "subscription", each.name)
            messages, length = messages_out(each), bytes_out(each)
            out, size = out + messages, size + length
            look((*key, "messages"), messages)
            look((*key, "bytes"), length)
            for consumer in each.consumers:
                consumer_key = (*key, consumer.info.name, str(consumer.info.consumer_id), consumer.link.peer)
                look((*consumer_key, "messages"), consumer.messages_out)
                look((*consumer_key, "bytes"), consumer.bytes_out)
                look((*consumer_key, "redelivered"), consumer.redelivered)
                look((*consumer_key, "acked"), consumer.acked_messages)
        look((name, "out"), out)
        look((name, "bytes out"), size)


def messages_out(subscription: Subscription) -> int:
    """Messages sent, by consumers that left and by those that are here."""
    return subscription.messages_out + sum(consumer.messages_out for consumer in subscription.consumers)


def bytes_out(subscription: Subscription) -> int:
    """The same in bytes."""
    return subscription.bytes_out + sum(consumer.bytes_out for consumer in subscription.consumers)
