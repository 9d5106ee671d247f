"""Records that somebody edited to nonsense: what they are about may be refused by an error that names the record, everything
else goes on, and nothing is deleted. A few cases of each kind, chosen once and for all, and those that have failed;
`make spoilt` has all of them."""

from __future__ import annotations

import random

import pytest
from tests.unit.broker.record_kinds import EPHEMERAL, kind_of, unknown
from tests.unit.broker.spoilt_cases import KINDS, LEDGERS, Spoilt

FOUND = 2
"""Cases of a kind that a broker finds."""
WATCHED = (*EPHEMERAL, "namespace", "partitioned topic", "log", "scalable topic", "subscription", "registration")
"""Kinds that a broker which runs reads again: one case each of a record that is edited under it."""
FAILED = {
    ("log", "ledgers.0.ledgerId = -1"),
    ("log", "incarnation = 'x\\x00\N{PILE OF POO}'"),
    ("log", "properties.braid.incarnation missing"),
    ("cursor", "whole b'{'"),
    ("namespace", "autoSubscriptionCreationOverride.allowAutoSubscriptionCreation = []"),
    ("namespace", "bundles.boundaries.1 = {}"),
    ("partitioned topic", "partitions = -1"),
    ("registration", "whole b''"),
    ("scalable topic", "segments = {}"),
    ("scalable topic", "nextSegmentId = -1"),
    ("scalable topic", "pendingOperation.parents = []"),
    ("broker", "incarnation = no text"),
    ("leader of a scalable topic", "whole b'{}'"),
    ("sink", "current.txn = ''"),
    ("aborted transaction", "last = ''"),
    ("lock of a bundle", "incarnation = no text"),
}
"""What brokers got wrong."""
_shared: list[Spoilt] = []


@pytest.fixture
async def spoilt() -> Spoilt:
    """Made once: it is values only, and an application that any loop may run."""
    if not _shared:
        _shared.append(await Spoilt.make())
    return _shared[0]


@pytest.mark.parametrize("kind", KINDS)
async def test_one_record_of_nonsense_costs_what_it_is_about(spoilt: Spoilt, kind: str) -> None:
    chance = random.Random(kind)
    cases = spoilt.cases(kind)
    chosen = []
    for is_live, count in ((False, FOUND), (True, kind in WATCHED)):
        some = [case for case in cases if case.is_live == is_live]
        chosen += chance.sample(some, min(count, len(some)))
    for what in {what for each, what in FAILED if each == kind}:
        chosen.append(next(case for case in cases if case.what == what))
    assert chosen, f"nothing shows what a broker does with a damaged {kind}"
    found = {case: faults for case in dict.fromkeys(chosen) if (faults := await spoilt.faults(case))}
    assert not found


async def test_a_record_of_a_new_kind_is_noticed() -> None:
    assert unknown(["/admin/clusters/c", "/topics/t/n/x/controller", "/managed-ledgers/t/n/segment/x/0000-ffff-0/sub"]) == []
    assert unknown(["/topics/t/n/x/more", "/brand-new"]) == ["/brand-new", "/topics/t/n/x/more"]
    assert kind_of("/txn/0_1") == "transaction" and LEDGERS in KINDS
