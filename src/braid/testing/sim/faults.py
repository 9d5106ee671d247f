"""`Nemesis`: what goes wrong in a run. Each seed draws which faults it may use (swarm) and then when and where.

Every fault is written to the history before it happens and ends by itself or by `heal`, after which the world is sound again.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import msgspec

from braid.broker.bundles import lock_key
from braid.errors import BraidError, Closed
from braid.model.bundles import Bundle
from braid.model.names import NamespaceName, TopicName
from braid.runtime.env import Random
from braid.testing.sim.layouts import is_controller, topic_records
from braid.testing.sim.loop import WORLD, Node, on
from braid.testing.sim.txn_faults import attempt
from braid.testing.sim.txn_notes import coordinators, open_transactions
from braid.testing.sim.world import PORT, SESSION_SECONDS, Broker, World

NETWORK = ("reset", "half-open", "partition", "clog")
PROCESS = ("kill", "pause", "expire")
STORAGE = ("power-cut", "disk-stall", "disk-full", "disk-error", "sync-error")
STORE = ("store-refuses", "store-unknown", "store-conflict", "store-slow", "watch-loss", "watch-lag")
CLIENTS = ("client-crash",)
ALLOCATOR = ("low-ledger-id",)
LEADERS = ("kill-leader", "pause-leader", "expire-leader", "late-call", "part-brokers", "clog-brokers")
"""Faults that aim at the leaders of scalable topics and at what brokers ask of each other."""
OWNERSHIP = ("unload", "drain", "usurp")
TRANSACTIONS = ("kill-coordinator", "pause-coordinator", "abort-open", "pause-client", "second-owner")
"""Faults that aim at transactions: their coordinators, an operator who aborts one, clients that wake up too late, two owners of
one log."""


class Nemesis:
    """Breaks things at random moments until it is told to heal."""

    def __init__(
        self,
        world: World,
        rng: Random,
        faults: tuple[str, ...],
        *,
        clients: Callable[[], list[str]],
        crash: Callable[[str], None],
        pausable: Callable[[], list[Node]] | None = None,
        node_of: Callable[[str], Node | None] | None = None,
    ) -> None:
        """`clients` can be crashed by name; `pausable` are the nodes that can be paused, the brokers' unless told; `node_of`
        finds a client's."""
        self.enabled = tuple(fault for fault in faults if rng.random() < 0.5) or (rng.choice(faults),)
        self.count = 0
        self._world = world
        self._rng = rng
        self._clients = clients
        self._crash = crash
        self._pausable = pausable or (lambda: [broker.node for broker in world.brokers])
        self._node_of = node_of or (lambda _name: None)
        self._pace = rng.choice((0.4, 1.0, 2.5))
        self._acts: dict[str, Callable[[], Any]] = {
            "reset": self._reset,
            "half-open": self._half_open,
            "partition": self._partition,
            "clog": self._clog,
            "kill": self._kill,
            "pause": lambda: self._pause(self._rng.uniform(0.2, 6.0)),
            "expire": lambda: self._pause(SESSION_SECONDS * self._rng.uniform(1.05, 1.6)),
            "power-cut": self._power_cut,
            "disk-stall": self._stall,
            "disk-full": self._disk_full,
            "disk-error": lambda: self._disk_error("append", errno.EIO),
            "sync-error": lambda: self._disk_error("sync", errno.EIO),
            "store-refuses": lambda: self._trouble(unavailable=0.3),
            "store-unknown": lambda: self._trouble(unknown_applied=0.1, unknown_dropped=0.1, unknown_late=0.1),
            "store-conflict": lambda: self._trouble(conflict=0.3),
            "store-slow": lambda: self._trouble(delay=1.0),
            "watch-loss": lambda: self._trouble(drop_every=3),
            "watch-lag": lambda: self._trouble(watch_lag=3.0),
            "client-crash": self._client_crash,
            "kill-leader": lambda: self._kill(self._leader()),
            "pause-leader": lambda: self._pause(self._rng.uniform(0.2, 6.0), self._leader()),
            "expire-leader": lambda: self._pause(SESSION_SECONDS * self._rng.uniform(1.05, 1.6), self._leader()),
            "late-call": self._late_call,
            "part-brokers": lambda: self._partition(self._brokers()),
            "clog-brokers": lambda: self._clog(self._brokers()),
            "low-ledger-id": self._low_id,
            "unload": self._unload,
            "drain": self._drain,
            "usurp": self._usurp,
            "kill-coordinator": lambda: self._kill(self._coordinator()),
            "pause-coordinator": lambda: self._pause(self._rng.uniform(0.2, 6.0), self._coordinator()),
            "abort-open": self._abort_open,
            "pause-client": self._pause_client,
            "second-owner": self._second_owner,
        }
        world.history.add("world", "info", "swarm", [list(self.enabled), self._pace])

    async def run(self, seconds: float) -> None:
        """Break things for so long, at least one."""
        until = self._world.loop.time() + seconds
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / self._pace))
            if self._world.loop.time() >= until and self.count:
                return
            await self.act(self._rng.choice(self.enabled))

    async def act(self, name: str) -> None:
        """Do one fault."""
        done = self._acts[name]()
        if asyncio.iscoroutine(done):
            await done

    async def heal(self) -> None:
        """End every fault and wait until all brokers serve."""
        world = self._world
        world.trouble.clear()
        world.disk.capacity = 1 << 40
        world.disk.clear_faults()
        world.speed.stall_until = 0.0
        world.fabric.heal_all()
        await world.settle()
        world.history.add("world", "info", "healed")

    def note(self, name: str, *details: Any) -> None:
        """Write down a fault that is about to happen."""
        self.count += 1
        self._world.fault(name, *details)

    def _later(self, seconds: float, callback: Callable[..., Any], *args: Any) -> None:
        self._world.loop.call_later(seconds, callback, *args)

    # Network

    def _reset(self) -> None:
        if ends := self._world.fabric.ends():
            end = self._rng.choice(ends)
            self.note("reset", end.host, end.peer.host)
            end.reset()

    def _half_open(self) -> None:
        if ends := self._world.fabric.ends():
            end = self._rng.choice(ends)
            self.note("half-open", end.host, end.peer.host)
            end.vanish()

    def _pair(self) -> tuple[str, str]:
        return self._rng.choice(self._clients()), f"broker-{self._broker()}"

    def _brokers(self) -> tuple[str, str]:
        """Two of them, or one and itself if there are no two."""
        hosts = [broker.node.name for broker in self._world.brokers]
        one, other = self._rng.sample(hosts, 2) if len(hosts) > 1 else (hosts[0], hosts[0])
        return one, other

    def _partition(self, chosen: tuple[str, str] | None = None) -> None:
        pair, seconds = chosen or self._pair(), self._rng.uniform(0.1, 12.0)
        self.note("partition", *pair, round(seconds, 3))
        self._world.fabric.cut(*pair)
        self._later(seconds, self._world.fabric.heal, *pair)

    def _clog(self, chosen: tuple[str, str] | None = None) -> None:
        pair, late = chosen or self._pair(), self._rng.uniform(0.05, 2.0)
        self.note("clog", *pair, round(late, 3))
        self._world.fabric.clog(*pair, late)
        self._later(self._rng.uniform(0.5, 6.0), self._world.fabric.clog, *pair, 0.0)

    # Processes

    def _broker(self) -> int:
        return self._rng.randrange(len(self._world.brokers))

    def _leader(self) -> int:
        """A broker that leads a scalable topic; any, if there is none."""
        rows = self._world.engine.tables.rows
        leading = [row[-1] for key, row in sorted(rows.items()) if is_controller(key)]
        if not leading:
            return self._broker()
        host = str(msgspec.json.decode(self._rng.choice(leading))).partition(":")[0]
        return next((broker.number for broker in self._world.brokers if broker.node.name == host), 0)

    async def _kill(self, chosen: int | None = None) -> None:
        number = self._broker() if chosen is None else chosen
        silently = self._rng.random() < 0.3
        self.note("kill", number, silently)
        self._world.kill(number, silently=silently)
        await asyncio.sleep(self._rng.uniform(0.0, 3.0))
        if self._world.brokers[number].node.is_dead and not self._world.is_rebooting:
            await self._world.restart(number)

    async def _late_call(self) -> None:
        """What a leader asks of another broker is held up there until the leader has died and has a successor."""
        world = self._world
        caught: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()

        def ambush(caller: Node, host: str) -> None:
            if not caught.done():
                self._find(host).node.is_paused = True
                caught.set_result((caller.name, host))

        world.calls.ambush = ambush
        await asyncio.wait([caught], timeout=self._rng.uniform(2.0, 6.0))
        world.calls.ambush = None
        if not caught.done():
            return
        leader, callee = map(self._find, caught.result())
        self.note("late-call", leader.number, callee.number)
        await asyncio.sleep(self._rng.uniform(0.1, 0.5))  # the request is there, unread
        terms = self._terms()
        world.kill(leader.number)
        until = world.loop.time() + SESSION_SECONDS * 0.9  # then the callee would lose what it owns
        await asyncio.sleep(0.2)
        if not world.is_rebooting:
            await world.restart(leader.number)
        while self._terms() <= terms and world.loop.time() < until:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.1)
        world.resume_node(callee.node)

    def _terms(self) -> int:
        """Of all leaders of scalable topics together: grows with each one that takes over."""
        return sum(record.leader_epoch for record in topic_records(self._world.engine.tables.rows).values())

    def _find(self, host: str) -> Broker:
        return next(broker for broker in self._world.brokers if broker.node.name == host)

    def _pause(self, seconds: float, chosen: int | None = None) -> None:
        node = self._rng.choice(self._pausable()) if chosen is None else self._world.brokers[chosen].node
        if node.is_paused or node.is_dead:
            return
        self.note("pause", node.name, round(seconds, 3))
        node.is_paused = True
        self._later(seconds, self._world.resume_node, node)

    def _client_crash(self) -> None:
        name = self._rng.choice(self._clients())
        self.note("client-crash", name)
        self._crash(name)

    # Transactions

    def _coordinator(self) -> int:
        """A broker that leads a coordinator partition; any, if there is none."""
        leading = coordinators(self._world.engine.tables.rows)
        return self._find(self._rng.choice(leading)).number if leading else self._broker()

    def _abort_open(self) -> None:
        """An operator ends a transaction that somebody is using."""
        broker = self._world.brokers[self._broker()]
        found = open_transactions(self._world.engine.tables.rows)
        if found and broker.is_up and not broker.node.is_paused:
            txn = self._rng.choice(found)
            self.note("abort-open", broker.number, str(txn))
            coordinator = broker.service.transactions.coordinator
            self._world.spawn(broker.node, attempt(coordinator.end(txn, commit=False)), "abort")

    def _pause_client(self) -> None:
        node = self._node_of(self._rng.choice(self._clients()))
        if node is None or node.is_paused or node.is_dead:
            return
        seconds = self._rng.uniform(0.5, 9.0)
        self.note("pause", node.name, round(seconds, 3))
        node.is_paused = True
        self._later(seconds, self._world.resume_node, node)

    # Storage

    async def _power_cut(self) -> None:
        if not self._world.is_rebooting:
            self.note("power-cut")
            await self._world.power_cut()

    def _stall(self) -> None:
        seconds = self._rng.uniform(0.05, 3.0)
        self.note("disk-stall", round(seconds, 3))
        self._world.speed.stall_until = self._world.loop.time() + seconds

    def _disk_full(self) -> None:
        disk = self._world.disk
        self.note("disk-full")
        disk.capacity = disk.used_bytes() + self._rng.randint(0, 3000)
        self._later(self._rng.uniform(0.2, 5.0), self._room_again)

    def _room_again(self) -> None:
        self._world.disk.capacity = 1 << 40

    def _disk_error(self, operation: Any, code: int) -> None:
        if self._rng.random() < 0.3:  # the whole process ends each time: not too often
            name = self._rng.choice(("journal-", "metadata.log", ""))
            self.note("disk-error", operation, name)
            self._world.disk.fail(operation, name, code)

    # The metadata store and the allocator

    def _trouble(self, **strengths: float) -> None:
        self.note("store", *strengths)
        for what, strength in strengths.items():
            setattr(self._world.trouble, what, strength)
        self._later(self._rng.uniform(0.2, 6.0), self._world.trouble.clear)

    def _low_id(self) -> None:
        broker = self._world.brokers[self._broker()]
        if broker.is_up:
            self.note("low-ledger-id")
            broker.ledgers.low_ids = True

    # Ownership

    def _unload(self) -> None:
        """Move a bundle, to a given broker or to whoever is asked next."""
        broker = self._world.brokers[self._broker()]
        if not broker.is_up or broker.node.is_paused:
            return
        ownership = broker.service.ownership
        owned = [(namespace, bundle) for namespace, bundles in ownership.owned().items() for bundle in bundles]
        if not owned:
            return
        namespace, bundle = self._rng.choice(owned)
        others = [f"broker-{each.number}:{PORT}" for each in self._world.brokers if each is not broker]
        destination = self._rng.choice(others) if others and self._rng.random() < 0.5 else None
        self.note("unload", broker.number, str(bundle), destination)
        self._world.spawn(broker.node, attempt(ownership.unload(namespace, bundle, destination=destination)), "unload")

    def _usurp(self) -> None:
        """Somebody opens a log that a broker serves."""
        broker = self._world.brokers[self._broker()]
        topics = sorted(broker.service.topics) if broker.is_up else []
        if topics:
            name = TopicName.parse(self._rng.choice(topics)).managed_ledger_name
            self.note("usurp", broker.number, name)
            self._world.usurp(name)

    def _second_owner(self) -> None:
        self.replace(self._world.brokers[self._broker()])

    def replace(self, first: Broker) -> None:
        """A lock of a broker vanishes, another broker takes it and loads what the first one serves, which is told late."""
        others = [each for each in self._world.brokers if each is not first and each.is_up and not each.node.is_paused]
        if not others or not first.is_up:
            return
        second = self._rng.choice(others)
        owned = [(namespace, bundle) for namespace, bundles in first.service.ownership.owned().items() for bundle in bundles]
        if owned:
            namespace, bundle = self._rng.choice(owned)
            self.note("second-owner", first.number, second.number, str(bundle))
            with on(WORLD):
                self._trouble(watch_lag=self._rng.uniform(2.0, 6.0))
            self._world.spawn(second.node, attempt(self._take_over(first, second, namespace, bundle)), "take over")

    async def _take_over(self, first: Broker, second: Broker, namespace: NamespaceName, bundle: Bundle) -> None:
        await self._world.engine.delete(lock_key(namespace, bundle), None, None)
        await second.service.ownership._take(namespace, bundle)
        for name in map(TopicName.parse, sorted(first.service.topics)):
            if second.service.ownership.owns(name):
                self._world.spawn(second.node, attempt(second.service.topic(name, create=False)), "load")

    def _drain(self) -> None:
        """A broker gives everything away and, after a while, takes part again."""
        broker = self._world.brokers[self._broker()]
        if not broker.is_up or broker.node.is_paused or len(self._world.brokers) == 1:
            return
        self.note("drain", broker.number)
        ownership = broker.service.ownership
        self._world.spawn(broker.node, attempt(ownership.drain()), "drain")

        def back() -> None:
            if not broker.node.is_dead:
                self._world.spawn(broker.node, _undrain(ownership), "undrain")

        self._later(self._rng.uniform(0.5, 5.0), back)


async def _undrain(ownership: Any) -> None:
    """Until it is accepted: a broker that stayed drained would leave nobody to serve."""
    while True:
        try:
            await ownership.undrain()
            return
        except (BraidError, Closed):
            await asyncio.sleep(0.5)
