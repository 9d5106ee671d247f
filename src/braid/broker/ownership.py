"""`Ownership`: which topics this broker serves, and whom to ask for the others.

The topics of a namespace are grouped in bundles; a broker serves a bundle while it holds the bundle's lock, an ephemeral record
of its metadata session. The safety argument: **a lock tells whom to ask; who may write is decided by the log itself.** Opening
a log CASes its record with a new owner epoch and fences its ledger (INV2), so of two brokers that both believe to hold a bundle
only the later opener can append, and the other one's next write is refused and drops its topic; one that does not write is
told by its log's record (`log_owners.py`). So that the later opener is the one that holds the bundle, it reads the lock from
the store between claiming a log and using it (`confirm`): a former holder that has not heard yet gives the log up untouched. A
broker whose session is lost or may be stops serving at once and writes nothing more, takes a new session and registers again.

Owns the choice of an owner (the live broker with the fewest bundles, unless a hint says otherwise), lookup, hand-over by hints,
draining and what happens when the session is lost; `Holdings` takes and gives up, `Leading` elects a leader and balances.
Everything that reacts to a watch is also done by `reconcile`, every `broker.reconcile_seconds` (INV15).
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from braid.broker.balance import emptiest
from braid.broker.bundles import BundleLock, BundleTable, bundle_of, decode_lock, lock_key
from braid.broker.config import BrokerConfig
from braid.broker.holdings import BundleHost, Held, Holdings
from braid.broker.leading import Leading
from braid.broker.namespaces import Namespaces
from braid.broker.registry import BrokerInfo, Registry
from braid.errors import (
    BraidError,
    Conflict,
    InvariantBroken,
    MetadataFailure,
    NotFound,
    NotReady,
    StoreMismatch,
    TopicNotFound,
)
from braid.metadata.api import MetadataStore, Session
from braid.metadata.locks import LockBusy, ResourceLocks
from braid.model.bundles import Bundle, find, hash_of
from braid.model.names import NamespaceName, TopicName
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks

log = logging.getLogger(__name__)
ATTEMPTS = 5
"""Of one lookup whose bundle changes hands under it."""
RETRY_SECONDS = 0.5
DROPPED_AT_ONCE = 16
"""Bundles of a lost session that are dropped without a pause."""


class OwnedElsewhere(NotReady):
    """Another broker serves the topic; clients look it up again, administrators are sent there."""

    def __init__(self, what: object, owner: BrokerInfo) -> None:
        super().__init__(f"{what} is served by the broker {owner.broker_id}, not by this one; look it up again.")
        self.owner = owner


class BundleUnloading(MetadataFailure):
    """The bundle is changing hands at this moment."""

    status = 503


class Found(msgspec.Struct, frozen=True):
    """Whom to ask for a topic."""

    broker: BrokerInfo
    is_mine: bool
    authoritative: bool
    """The broker was chosen and shall take the topic when it is asked."""


class Ownership:
    """See the module."""

    def __init__(
        self, runtime: Runtime, config: BrokerConfig, metadata: MetadataStore, namespaces: Namespaces, host: BundleHost
    ) -> None:
        self.incarnation = runtime.token(64)
        self.is_draining = False
        self._config = config
        self._clock = runtime.clock
        self._metadata = metadata
        self._namespaces = namespaces
        self._locks = ResourceLocks(metadata, runtime.clock, reconcile_seconds=config.reconcile_seconds)
        self._registry = Registry(metadata, runtime.clock, self._locks)
        self._table = BundleTable(metadata, runtime.clock, self._poke)
        self.leading = Leading(metadata, runtime.clock, self._registry, self._table, reconcile_seconds=config.reconcile_seconds)
        self._tasks = Tasks("ownership")
        self.holdings = Holdings(runtime.clock, self._locks, self._table, host, self._tasks)
        self._news = asyncio.Event()
        self._is_closing = False

    # ---- what others ask --------------------------------------------------------------------------------------------------

    @property
    def broker_id(self) -> str:
        """Host and HTTP port; empty before the broker is announced."""
        return "" if self._registry.me is None else self._registry.me.broker_id

    @property
    def me(self) -> BrokerInfo:
        if self._registry.me is None:
            raise NotReady("The broker is starting; try again in a moment.")
        return self._registry.me

    @property
    def is_leader(self) -> bool:
        """Whether this broker leads the others."""
        return self.leading.is_leader

    async def brokers(self) -> list[BrokerInfo]:
        """The live brokers, by id."""
        return self._registry.live()

    def broker(self, broker_id: str) -> BrokerInfo | None:
        """A live broker, by its id."""
        return self._registry.get(broker_id)

    async def leader(self) -> BrokerInfo | None:
        """The broker that balances; None while there is none."""
        return await self.leading.leader()

    async def bundles(self, namespace: NamespaceName) -> list[Bundle]:
        """The bundles of a namespace, in order. Raises TopicNotFound if it does not exist."""
        return list((await self._namespaces.policies(namespace)).bundles)

    async def owner(self, namespace: NamespaceName, bundle: Bundle, *, fresh: bool = False) -> BrokerInfo | None:
        """Who serves a bundle; None if nobody does at the moment."""
        key = lock_key(namespace, bundle)
        lock = await self._read_lock(key) if fresh else self._table.owner(key)
        return None if lock is None else self._named(lock)

    async def owner_of(self, topic: TopicName) -> BrokerInfo | None:
        """Who serves a topic, asked of the store, also if this broker believes that it does; takes nothing."""
        held = self.holdings.holding(topic.namespace, hash_of(topic))
        if held is not None and await held.lock.check() and held.serves():
            return self.me
        bundle = find((await self._namespaces.policies(topic.namespace)).bundles, hash_of(topic))
        return await self.owner(topic.namespace, bundle, fresh=True)

    def owned(self) -> dict[NamespaceName, list[Bundle]]:
        """What this broker serves now."""
        found: dict[NamespaceName, list[Bundle]] = {}
        for held in self.holdings.all():
            if held.lock.holds():
                found.setdefault(held.namespace, []).append(held.bundle)
        return {namespace: sorted(bundles) for namespace, bundles in found.items()}

    def owns(self, topic: TopicName) -> bool:
        """Whether this broker serves the topic now. Ask before each act and keep no answer."""
        held = self.holdings.holding(topic.namespace, hash_of(topic))
        return held is not None and held.serves()

    async def confirm(self, topic: TopicName) -> None:
        """Ask the store whether this broker holds the topic's bundle; raises NotReady if not, and has let it go then. For
        whoever has claimed the topic's log: the holder of the lock claims later or has lost it."""
        held = self.holdings.holding(topic.namespace, hash_of(topic))
        if held is None or not await held.lock.check() or not held.serves():
            raise NotReady(f"The topic {topic} moved to another broker while it was loaded; look it up again.")

    async def find(self, topic: TopicName, *, authoritative: bool = False) -> Found:
        """Whom to ask for a topic; takes its bundle if it is nobody's and this broker is the one to have it, or if somebody who
        knows (`authoritative`) sent the client here.

        Raises TopicNotFound (no such namespace), BundleUnloading, NotReady (nobody can take it, or this broker is not ready).
        """
        me = self.me
        namespace, number = topic.namespace, hash_of(topic)
        held = self.holdings.holding(namespace, number)
        if held is not None and held.is_unloading:
            raise _unloading(held.bundle, namespace)
        if held is not None and held.lock.holds():
            return Found(me, True, True)
        if self._is_closing or not self._registry.is_registered:
            raise NotReady(f"The broker {me.broker_id} is not part of the cluster at the moment; ask another or try again.")
        bundle = find((await self._namespaces.policies(namespace)).bundles, number)
        key = lock_key(namespace, bundle)
        for _attempt in range(ATTEMPTS):
            lock = await self._read_lock(key, fresh=False)  # taking it is decided by creating its record
            if lock is not None and lock.broker_id != me.broker_id:
                if lock.disabled:
                    raise _unloading(bundle, namespace)
                return Found(self._named(lock), False, False)
            if lock is not None and self.is_draining:
                raise _unloading(bundle, namespace)
            # A lock in our name that we do not hold is left over: others send clients here, so nobody else can take it.
            is_ours = lock is not None or (authoritative and not self.is_draining)
            chosen = me if is_ours else await self._choose(key)
            self._table.promise(key, chosen.broker_id)  # counts from now on, or a burst of lookups goes to one broker
            if chosen.broker_id != me.broker_id:
                return Found(chosen, False, True)
            try:
                taken = await self._take(namespace, bundle)
            except LockBusy:
                continue
            if taken:
                return Found(me, True, True)
            break
        raise NotReady(f"The bundle {bundle} of {namespace} keeps changing hands; try again.")

    # ---- what administrators do -------------------------------------------------------------------------------------------

    async def unload(self, namespace: NamespaceName, bundle: Bundle, *, destination: str | None = None) -> None:
        """Close the bundle's topics and give it up; with a destination that broker takes it, otherwise the next to be asked.

        Raises NotFound (no such bundle or destination), Conflict (a destination that drains), OwnedElsewhere.
        """
        await self._check_bundle(namespace, bundle)
        if destination is not None:
            self._check_destination(destination)
        key = lock_key(namespace, bundle)
        held = self.holdings.at(namespace, bundle)
        if held is None:
            lock = await self._read_lock(key)
            if lock is not None and lock.broker_id != self.me.broker_id:
                raise OwnedElsewhere(f"The bundle {bundle} of {namespace}", self._named(lock))
            if destination is not None:
                await self._table.put_hint(key, destination)
            return
        if destination == self.broker_id:
            return
        if destination is not None:
            await self._table.put_hint(key, destination)
        await self.holdings.give_up(held)

    async def split(self, namespace: NamespaceName, bundle: Bundle) -> None:
        """Replace a bundle by its two halves; its topics are closed and found again by their clients.

        Raises NotFound, OwnedElsewhere, BundleUnloading, NotReady (this broker takes none).
        """
        await self._check_bundle(namespace, bundle)
        bundle.halves()
        held = self.holdings.at(namespace, bundle)
        if held is None:  # taken for the split, or somebody might serve it next to its halves
            owner = await self.owner(namespace, bundle, fresh=True)
            if owner is not None and owner.broker_id != self.broker_id:
                raise OwnedElsewhere(f"The bundle {bundle} of {namespace}", owner)
            try:
                held = await self.holdings.acquire(namespace, bundle, self.me)
            except LockBusy:
                raise _unloading(bundle, namespace) from None
        if held.is_unloading:
            raise _unloading(bundle, namespace)
        is_split = False

        async def replace() -> None:
            nonlocal is_split
            await self._namespaces.split_bundle(namespace, bundle)
            is_split = True

        await self.holdings.give_up(held, replace)
        if not is_split:
            raise NotReady(f"The bundle {bundle} of {namespace} was not split: its lock was lost just then; try again.")

    async def forget(self, namespace: NamespaceName) -> None:
        """The namespace is gone: so is what this broker holds of it."""
        for held in self.holdings.all(namespace):
            await self.holdings.give_up(held)

    async def drain(self) -> None:
        """Give every bundle away and take none, until `undrain`. Returns when nothing is left."""
        if not [info for info in self._registry.takers() if info.broker_id != self.broker_id]:
            raise Conflict(
                f"The broker {self.broker_id} is the only one that takes bundles; start another before you drain it."
            )
        await self._registry.update(is_draining=True)
        self.is_draining = self.holdings.takes_none = True
        await self.holdings.settle()
        while (held := next(iter(self.holdings.all()), None)) is not None:
            if not self.is_draining:
                raise Conflict(f"The broker {self.broker_id} takes bundles again; its drain has ended early.")
            if not held.is_unloading and (takers := self._registry.takers()):
                assigned = self._table.assigned([info.broker_id for info in takers])
                await self._table.put_hint(held.key, emptiest({each: len(keys) for each, keys in assigned.items()}))
            await self.holdings.give_up(held)

    async def undrain(self) -> None:
        """Take part again."""
        await self._registry.update(is_draining=False)
        self.is_draining = self.holdings.takes_none = False

    # ---- life -------------------------------------------------------------------------------------------------------------

    async def start(self, me: BrokerInfo) -> None:
        """Announce this broker to the others and take part."""
        session = self._metadata.session
        await self._registry.start(me, self._tasks)
        await self._table.start(self._tasks)
        self.leading.start(me, self._tasks)
        self._tasks.spawn(self._guard_session(session), "session")
        self._tasks.spawn(self._pursue_loop(), "hints")
        self._tasks.spawn(self._reconcile_loop(), "reconcile")
        if self._config.balance:
            self._tasks.spawn(self.leading.balance_for_ever(self._config.balance_seconds), "balance")

    async def leave(self) -> None:
        """No more clients for this broker: the first step of stopping. What it holds it serves until it is closed."""
        self._is_closing = self.holdings.takes_none = True
        await self.holdings.settle()
        try:
            await self._registry.close()
        except BraidError as error:
            log.info("the registration of %s ends with its session: %s", self.broker_id, error)

    async def close(self) -> None:
        """Give up the locks, whose topics are closed by now, and the leadership."""
        self._is_closing = True
        await self._tasks.close()
        self.holdings.clear()
        await self.leading.close()
        await self._locks.close()

    def kill(self) -> None:
        """Stop at once and give up nothing, as a crash would."""
        self._is_closing = True
        self.holdings.clear()
        self._tasks.cancel()
        self._locks.abandon()
        self.leading.abandon()

    async def _guard_session(self, session: Session) -> None:
        """Stop serving when the session is lost, then come back with a new one."""
        while not self._is_closing:
            await session.wait_lost()
            await self._clock.sleep(0)  # a broker whose clock stands still notices nothing
            if self._is_closing:
                return
            log.warning("the metadata session of %s is lost: its topics are dropped until it has a new one", self.broker_id)
            for number, held in enumerate(self.holdings.all(), 1):
                if number % DROPPED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # each is a look at all topics
                if not held.lock.holds():  # else it was taken with the next session already
                    try:
                        self.holdings.lost(held)
                    except InvariantBroken:
                        raise
                    except Exception:  # the others have to go too, and the reconcile tries this one again
                        log.exception("the bundle %s could not be dropped", held.bundle)
            while not self._is_closing:
                try:
                    await self._registry.register()
                    break
                except BraidError as error:
                    log.warning("the broker %s cannot register yet: %s", self.broker_id, error)
                except InvariantBroken:
                    raise
                except Exception:  # or it would never come back, and would not notice the end of another session
                    log.exception("the broker %s could not register and tries again", self.broker_id)
                await self._clock.sleep(RETRY_SECONDS)
            session = self._metadata.session

    async def reconcile(self) -> None:
        """Everything that watches and callbacks do, done again from what the store says."""
        try:
            await self._registry.register()
        except NotReady as error:  # another broker has our name; what is held here is compared all the same
            log.warning("the broker %s is not registered: %s", self.broker_id, error)
        await self._registry.reload()
        await self._table.reload()
        for held in self.holdings.all():
            if not held.lock.holds():
                self.holdings.lost(held)
            elif held.is_unloading or not await self._may_exist(held):
                self.holdings.give_up_soon(held)
        await self._pursue()
        await self.leading.drop_spent_hints()

    # ---- taking -----------------------------------------------------------------------------------------------------------

    async def _choose(self, key: str) -> BrokerInfo:
        """The broker that shall take a free bundle."""
        takers = {info.broker_id: info for info in self._registry.takers()}
        if not takers:
            raise NotReady("No broker takes topics at the moment; try again.")
        wanted = await self._table.hint(key) or self._table.promised(key)
        if wanted not in takers:
            wanted = emptiest({broker_id: len(keys) for broker_id, keys in self._table.assigned(takers).items()})
        return takers[wanted]

    async def _take(self, namespace: NamespaceName, bundle: Bundle) -> bool:
        """Take a bundle's lock; False if the bundle was split or its namespace deleted just before. Raises LockBusy."""
        held = await self.holdings.acquire(namespace, bundle, self.me)
        if await self._exists(held):
            return True
        await self.holdings.give_up(held)
        return False

    # ---- following hints, reconciling -------------------------------------------------------------------------------------

    def _poke(self) -> None:
        self._news.set()

    async def _pursue_loop(self) -> None:
        while True:
            await self._news.wait()
            await self._clock.sleep(0)  # a broker whose clock stands still notices nothing
            self._news.clear()
            try:
                await self._pursue()
            except BraidError as error:
                log.info("hand-overs wait for the metadata store: %s", error)
                await self._clock.sleep(RETRY_SECONDS)
            except InvariantBroken:
                raise
            except Exception:  # or no hint would ever be followed again
                log.exception("hand-overs failed in an unexpected way and are tried again")
                await self._clock.sleep(RETRY_SECONDS)

    async def _pursue(self) -> None:
        """Take what hints bring, give what they take away."""
        for key, broker_id in self._table.hints().items():
            place = bundle_of(key)
            if place is None:
                continue
            held = self.holdings.at(*place)
            if broker_id == self.broker_id:
                if held is not None:
                    await self._table.drop_hint(key)
                elif self._table.owner(key) is None and not self.is_draining and not self._is_closing:
                    await self._take_hinted(key, *place)
            elif held is not None and not held.is_unloading:
                taker = self._registry.get(broker_id)
                if taker is not None and not taker.is_draining:
                    self.holdings.give_up_soon(held)

    async def _take_hinted(self, key: str, namespace: NamespaceName, bundle: Bundle) -> None:
        try:
            await self._check_bundle(namespace, bundle)
            await self._take(namespace, bundle)
        except NotFound:
            await self._table.drop_hint(key)
        except LockBusy:
            return  # not free yet; its going tells us
        except (NotReady, StoreMismatch) as error:  # others are
            log.info("%s is not taken now: %s", key, error)

    async def _reconcile_loop(self) -> None:
        while True:
            await self._clock.sleep(self._config.reconcile_seconds)
            try:
                await self.reconcile()
            except BraidError as error:
                log.warning("ownership cannot be compared with the metadata store: %s", error)
            except InvariantBroken:
                raise
            except Exception:  # or what no watch told would never be put right
                log.exception("ownership could not be compared with the metadata store and is compared again")

    # ---- small things -----------------------------------------------------------------------------------------------------

    async def _read_lock(self, key: str, *, fresh: bool = True) -> BundleLock | None:
        record = await self._metadata.get(key, fresh=fresh)
        return None if record is None else decode_lock(record)

    def _named(self, lock: BundleLock) -> BrokerInfo:
        info = self._registry.get(lock.broker_id)
        return info if info is not None and info.incarnation == lock.incarnation else lock.as_broker()

    async def _exists(self, held: Held) -> bool:
        try:
            return held.bundle in (await self._namespaces.policies(held.namespace)).bundles
        except TopicNotFound:
            return False

    async def _may_exist(self, held: Held) -> bool:
        """The same, but for a namespace whose record cannot be read: what it had it keeps, and others are looked at."""
        try:
            return await self._exists(held)
        except StoreMismatch as error:
            log.info("whether %s still has the bundle %s cannot be told: %s", held.namespace, held.bundle, error)
            return True

    async def _check_bundle(self, namespace: NamespaceName, bundle: Bundle) -> None:
        if bundle not in (await self._namespaces.policies(namespace)).bundles:
            raise NotFound(f"The namespace {namespace} has no bundle {bundle}; list its bundles to see what it has.")

    def _check_destination(self, broker_id: str) -> None:
        info = self._registry.get(broker_id)
        if info is None:
            raise NotFound(f"There is no broker {broker_id} in the cluster; list the brokers to see their ids.")
        if info.is_draining:
            raise Conflict(f"The broker {broker_id} is being drained and takes no bundles; choose another.")


def _unloading(bundle: Bundle, namespace: NamespaceName) -> BundleUnloading:
    return BundleUnloading(f"The bundle {bundle} of {namespace} is being unloaded; look the topic up again in a moment.")
