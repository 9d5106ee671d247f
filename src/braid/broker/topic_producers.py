"""The producers of a topic: who is let in, who waits, and how they are sent away.

Owns names and exclusive access (one producer per name, a newer one takes a dead one's place) and what a client is told when its
producer is closed. Base of `Topic`, which owns the log that their messages go to. Must not touch entries.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from braid.broker.access import ProducerAccess
from braid.broker.link import Link
from braid.broker.producer import Producer, ProducerInfo
from braid.errors import BraidError, NotReady, ProducerBusy, TopicTerminated
from braid.managedledger.room import check_room
from braid.runtime.tasks import Tasks
from braid.wire.replies import close_producer, error, producer_success

if TYPE_CHECKING:
    from braid.broker.config import BrokerConfig
    from braid.broker.dedup import MessageDeduplication
    from braid.broker.topic import Topic
    from braid.managedledger.log import ManagedLedger
    from braid.model.names import TopicName
    from braid.runtime.clock import Clock


class TopicProducers:
    """See the module."""

    __slots__ = (
        "_producer_lock",
        "access",
        "clock",
        "config",
        "dedup",
        "is_closing",
        "is_segment",
        "log",
        "name",
        "producers",
        "released",
        "tasks",
    )

    def __init__(self, name: TopicName, config: BrokerConfig, clock: Clock) -> None:
        self.name = name
        self.config = config
        self.clock = clock
        self.is_segment = name.descriptor is not None
        self.log: ManagedLedger
        self.dedup: MessageDeduplication | None = None
        self.tasks = Tasks(f"topic {name}")
        self.producers: dict[str, Producer] = {}
        self.access = ProducerAccess(cast("Topic", self))
        self.is_closing = False
        self.released: list[Producer] = []
        """Producers that are told of the end when what they sent is answered."""
        self._producer_lock = asyncio.Lock()

    def check_open(self) -> None:
        if self.is_closing:
            raise NotReady(f"The topic {self.name} is being closed; look it up again.")

    async def add_producer(self, info: ProducerInfo, link: Link) -> Producer:
        """Admit a producer; its `admission.is_ready` is False while it waits for exclusive access."""
        while True:
            self.check_open()
            if self.log.is_terminated:
                raise TopicTerminated(f"The topic {self.name} was terminated and takes no more messages.")
            # Not on the first message: this refusal every client shows at once, and fails with it what waits in the producer.
            check_room(self.log.name, self.log.resolver)
            if (rival := self.producers.get(info.name)) is not None:
                # Outside the lock: others need not wait until a dead connection is known to be dead.
                await self._challenge(rival, info, link)
                continue
            async with self._producer_lock:
                if info.name in self.producers or self.is_closing or self.log.is_terminated:
                    continue
                return await self._admit(Producer(info, link, cast("Topic", self), self.clock.now_ms()))

    async def _admit(self, producer: Producer) -> Producer:
        producer.admission = await self.access.admit(producer)
        if self.is_closing:
            self.access.forget(producer)
            self.check_open()
        if producer.admission.is_ready:
            self.producers[producer.info.name] = producer
        return producer

    async def _challenge(self, old: Producer, info: ProducerInfo, link: Link) -> None:
        """One producer per name: a newer epoch of the same producer, or the death of the old one's link, frees it."""
        is_same = old.link is link and old.producer_id == info.producer_id
        if not (is_same and info.epoch > old.info.epoch):
            if await old.link.probe(self.config.liveness_check_ms) and self.producers.get(info.name) is old:
                raise ProducerBusy(
                    f"A producer named {info.name} is connected to {self.name} already (from {old.link.peer}); "
                    "choose another name or close that one."
                )
            if self.producers.get(info.name) is old:
                old.link.abort()
        if self.producers.get(info.name) is old:
            self._forget(old)

    def remove_producer(self, producer: Producer) -> None:
        """The producer is gone. Idempotent."""
        if producer.is_closed:
            return
        self._forget(producer)

    def _forget(self, producer: Producer) -> None:
        """The name and the exclusive access of this producer are free again."""
        producer.is_closed = True
        if producer.lane is not None:
            producer.lane.drop()
        if self.producers.get(producer.info.name) is producer:
            del self.producers[producer.info.name]
        self.access.forget(producer)
        if self.access.waiting and not self.is_closing:
            self.tasks.spawn(self._promote(), "promote-producer")

    async def _promote(self) -> None:
        async with self._producer_lock:
            promoted = None if self.is_closing else await self.access.promote()
            if promoted is not None:
                self.producers[promoted.info.name] = promoted
                promoted.link.write(self.success_frame(promoted))

    def success_frame(self, producer: Producer) -> bytes:
        """PRODUCER_SUCCESS: sent once, or twice to a producer that had to wait for exclusive access."""
        info = producer.info
        return producer_success(
            info.request_id,
            info.name,
            last_sequence_id=self.dedup.last_sequence_id(info.name) if self.dedup is not None and producer.is_judged else -1,
            schema_version=info.schema_version,
            topic_epoch=producer.admission.topic_epoch,
            producer_ready=producer.admission.is_ready,
            elders=self._elders_of(producer),
        )

    def _elders_of(self, producer: Producer) -> dict[int, int]:
        """What lanes of the producer's name stored in the segments that this one came from; others' clients do not ask."""
        if self.dedup is None or not (self.is_segment and producer.link.is_braid and producer.is_judged):
            return {}
        return self.dedup.elders_of(producer.info.name)

    def refuse_waiter(self, producer: Producer, failure: BraidError) -> None:
        producer.is_closed = True
        producer.link.write(error(producer.info.request_id, failure.code, failure.message))
        if producer.on_closed is not None:
            producer.on_closed(producer)

    def disconnect_producer(self, producer: Producer) -> None:
        """Tell the client that its producer is closed; it will come back and be told how things are."""
        if producer.is_closed:
            return
        self._forget(producer)
        if producer.on_closed is not None:
            producer.on_closed(producer)
        self._tell_closed(producer)

    @staticmethod
    def _tell_closed(producer: Producer) -> None:
        if producer.link.protocol_version >= 5:
            is_settled = producer.link.is_braid and producer.is_settled
            producer.link.write(close_producer(producer.producer_id, is_settled=is_settled))
        else:
            producer.link.close()

    def release_producer(self, producer: Producer) -> None:
        """Close a producer whose messages are to go elsewhere: what it sends from now on is dropped or refused, what is on its
        way is answered first. So it sends nothing again that is stored, and needs no deduplication for that."""
        if producer.is_closed:
            return
        self._forget(producer)
        if producer.on_closed is not None:
            producer.on_closed(producer)
        if producer.idle_callback is None:  # else its client is closing it, and is answered then
            self.released.append(producer)
            producer.when_idle(lambda: self._tell_closed(producer))
