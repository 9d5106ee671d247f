"""Producer access modes: who may publish to a topic at the same time.

Owns the exclusive owner, the queue of those who wait for it, and the topic epoch: a counter in the log's record that grows
with each new exclusive owner and fences those that come back with an older one.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from braid.broker.producer import Admission, Producer, ProducerInfo
from braid.errors import BraidError, ProducerBusy, ProducerFenced
from braid.wire.types import ProducerAccessMode

if TYPE_CHECKING:
    from braid.broker.topic import Topic

EPOCH_PROPERTY = "_braid.topicEpoch"


class ProducerAccess:
    """Admission of producers to one topic."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self.owner: Producer | None = None
        self.waiting: deque[Producer] = deque()

    @property
    def epoch(self) -> int | None:
        """Current topic epoch, if there ever was an exclusive owner."""
        value = self._topic.log.properties.get(EPOCH_PROPERTY)
        return None if value is None else int(value)

    async def admit(self, producer: Producer) -> Admission:
        """Let the producer in, queue it, or refuse it. Called under the topic's producer lock."""
        info = producer.info
        mode = info.access_mode
        if mode is ProducerAccessMode.SHARED:
            self._check_shared(info)
            return Admission(is_ready=True)
        self._check_epoch(info)
        others = bool(self._topic.producers) or self.owner is not None
        if mode is ProducerAccessMode.EXCLUSIVE and (others or self.waiting):
            raise ProducerFenced(f"The topic {self._topic.name} has producers already; exclusive access is refused.")
        if mode is ProducerAccessMode.WAIT_FOR_EXCLUSIVE and others:
            self.waiting.append(producer)
            return Admission(is_ready=False)
        if mode is ProducerAccessMode.EXCLUSIVE_WITH_FENCING:
            self._fence_others()
        return Admission(is_ready=True, topic_epoch=await self._take(producer))

    def _check_shared(self, info: ProducerInfo) -> None:
        if self.owner is not None or self.waiting:
            raise ProducerBusy(f"The topic {self._topic.name} has an exclusive producer; {info.name} cannot join it.")

    def _check_epoch(self, info: ProducerInfo) -> None:
        current = self.epoch
        if info.topic_epoch is not None and current is not None and info.topic_epoch < current:
            raise ProducerFenced(
                f"Producer {info.name} had exclusive access to {self._topic.name} at epoch {info.topic_epoch}; "
                f"the epoch is {current} now: another producer took over."
            )

    def _fence_others(self) -> None:
        """Close every producer and every waiter: the newcomer takes the topic over."""
        self.refuse_waiters(ProducerFenced(f"Another producer took {self._topic.name} over by fencing."))
        for producer in list(self._topic.producers.values()):
            self._topic.disconnect_producer(producer)

    async def _take(self, producer: Producer) -> int:
        current = self.epoch
        given = producer.info.topic_epoch
        # An owner that comes back with the current epoch keeps it: nobody took the topic in between.
        epoch = current if given is not None and given == current else (0 if current is None else current + 1)
        if epoch != current:
            await self._topic.log.set_properties({EPOCH_PROPERTY: str(epoch)})
        self.owner = producer
        return int(epoch or 0)

    def forget(self, producer: Producer) -> None:
        """A producer is gone, from the queue too."""
        if self.owner is producer:
            self.owner = None
        if producer in self.waiting:
            self.waiting.remove(producer)

    async def promote(self) -> Producer | None:
        """If the topic is free, give it to the next waiter. Called under the topic's producer lock."""
        while self.waiting and self.owner is None and not self._topic.producers:
            promoted = self.waiting.popleft()
            try:
                epoch = await self._take(promoted)
            except BraidError as failure:
                if not promoted.is_closed:
                    self._topic.refuse_waiter(promoted, failure)
                continue
            if promoted.is_closed:  # it left while the epoch was written
                self.forget(promoted)
                continue
            promoted.admission = Admission(is_ready=True, topic_epoch=epoch)
            return promoted
        return None

    def refuse_waiters(self, failure: BraidError) -> None:
        """Nobody will get the topic by waiting any more."""
        waiters, self.waiting = list(self.waiting), deque()
        for waiter in waiters:
            self._topic.refuse_waiter(waiter, failure)
