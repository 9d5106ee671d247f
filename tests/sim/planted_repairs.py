"""Planted bugs that were in the product once; see `planted.py`. They are numbered from 201 on.

Each takes one repair away. Where what it takes to see it is rare, it is made to happen more often.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tests.sim.planting import Patch, Plant, changed

from braid.broker import segments
from braid.broker.log_owners import LogOwners
from braid.broker.ownership import Ownership
from braid.broker.segments import LocalSegments
from braid.client.queue_consumer import QueueConsumer
from braid.errors import StoreUnavailable
from braid.ledger.backends.local.commit import GroupCommit
from braid.scalable import draining, plans_topic
from braid.scalable.handover import GroupPlaces
from braid.scalable.term import Term
from braid.testing.sim import txn_faults
from braid.txn.pending_acks import MetadataPendingAckStore

SPIN_SECONDS = 8.0
"""On the clock of the wall: a run that spins is not waited for as long as one that is slow."""

PATIENCE_SECONDS = 0.3
"""Of who waits for the end of another transaction, in the eyes of bug 201."""

SETTLING_SECONDS = 1.5
"""What it takes to settle something, in the eyes of bug 215."""


def shared_patience() -> list[Patch]:
    """The end of one waiter's patience is told to all, for ever. Here they have less of it, and more to wait for."""
    materialise = MetadataPendingAckStore._materialise_at_last

    async def slowly(store: Any, *anything: Any) -> None:
        await asyncio.sleep(5 * PATIENCE_SECONDS)
        await materialise(store, *anything)

    honest = "        await wait_at_most(self._clock, news, until - self._clock.monotonic())\n"
    shared = (
        "        timer = self._clock.call_later(max(0.0, until - self._clock.monotonic()), news.set)\n"
        "        try:\n"
        "            await news.wait()\n"
        "        finally:\n"
        "            timer.cancel()\n"
    )
    return [
        (MetadataPendingAckStore, "_materialise_at_last", slowly),
        *changed(MetadataPendingAckStore, "_judge", honest, shared, SETTLE_SECONDS=PATIENCE_SECONDS),
    ]


def owners_who_do_not_look() -> list[Patch]:
    """Only a write tells an owner that it has a successor: neither its reconciliation, nor loading, nor a leader's question."""

    async def trust(_self: Any, _anything: Any) -> None:
        """All is well."""

    async def ours(_log: Any) -> None:
        """It certainly is."""

    return [
        (txn_faults, "DEEDS", ("replace",)),  # what it takes to see it, more often than the others
        (LogOwners, "look", trust),
        (Ownership, "confirm", trust),
        *changed(LocalSegments, "backlog", "    await found.log.check_owner()\n", ""),
        *changed(LocalSegments, "stats", "    await topic.log.check_owner()\n", ""),
    ]


def forced_and_forgotten() -> list[Patch]:
    """Neither does a deletion by force wait for its turn, nor does the leader look for what is unfinished. Here the first
    deletion of each topic fails, and whoever settles that takes his time after it was done."""
    queued = '            queued = self._begin("deletion", body, lambda _nothing: None)\n'
    delete, settle = plans_topic.delete, Term._settle
    failed: set[str] = set()

    async def fail_first(work: Any, *, force: bool = False) -> None:
        if not force and work.incarnation not in failed:
            failed.add(work.incarnation)
            raise StoreUnavailable("Not now.")
        await delete(work, force=force)

    async def settle_slowly(term: Any) -> None:
        await settle(term)
        await asyncio.sleep(SETTLING_SECONDS)

    async def nothing(_term: Any) -> bool:
        return False

    return [
        (plans_topic, "delete", fail_first),
        (Term, "_settle", settle_slowly),
        (Term, "_is_left_over", nothing),
        *changed(Term, "delete", queued, "            queued = asyncio.get_running_loop().create_future()\n"),
    ]


def own_starts() -> list[Patch]:
    """A member that joins a group begins where it likes."""

    def unknown(_places: Any, _segment: Any) -> None:
        """Nobody knows."""

    return [(GroupPlaces, "of", unknown)]


def given_at_once() -> list[Patch]:
    """A segment moves inside a group without waiting for its place."""

    def all_of_it(_places: Any, wanted: Any, _sessions: Any) -> Any:
        return wanted

    return [(GroupPlaces, "restrained", all_of_it)]


def no_young_segments() -> list[Patch]:
    """A cursor that is missing begins where its subscription did, however young the segment is."""

    def begin(initial: str, *, subscribed_at: int, created_at: int) -> str:
        return initial

    return [(draining, "cursor_start", begin), (segments, "cursor_start", begin)]


REPAIRED: dict[int, Plant] = {
    201: Plant(
        "the end of one waiter's patience wakes all others for ever", "W4", 38, ("limit",), shared_patience, SPIN_SECONDS
    ),
    203: Plant(
        "only a write tells an owner that it has a successor", "W11", 5, ("C1", "C6", "C7", "C18"), owners_who_do_not_look
    ),
    207: Plant("a member that joins a group begins where it likes", "W14", 0, ("C1", "C3"), own_starts),
    208: Plant("a segment moves inside a group before its place is known", "W14", 1, ("C1", "C3"), given_at_once),
    212: Plant(
        "a group that begins while another one fails takes its place",
        "W1",
        157,
        ("C18",),
        lambda: changed(
            GroupCommit,
            "_written",
            "        self.failed_job(error)  # still busy: no other group begins before those of this one are told\n",
            "        self._is_busy = False\n        self.failed_job(error)\n",
        ),
    ),
    213: Plant(
        "a young segment decides where a queue subscription begins",
        "W13",
        0,
        ("C1", "C17"),
        lambda: changed(
            QueueConsumer,
            "_add",
            "self.layouts.is_synthetic and info.segment_id >= self._first_new",
            "info.created_at_epoch > 0",
        ),
    ),
    215: Plant(
        "a deletion by force is left to an operation that is over",
        "W15",
        1,
        ("C18",),
        forced_and_forgotten,
    ),
    218: Plant("cursors that are missing in young segments begin at the end", "W13", 11, ("C1",), no_young_segments),
}

CAUGHT_BY_TESTS: dict[str, str] = {
    "a seek leaves registrations whose removal is owed": "unit/scalable/test_subscription_plans.py::"
    "test_a_seek_takes_away_also_what_the_record_of_a_consumer_that_left_still_says",
    "a seek leaves what a write in doubt has assigned": "unit/scalable/test_subscription_plans.py::"
    "test_a_seek_takes_away_also_what_a_write_without_a_good_answer_has_given",
    "a leader that is unsure for a moment assigns nothing any more": "unit/scalable/test_stale_terms.py::"
    "test_a_leader_that_is_unsure_for_a_moment_goes_on_or_steps_down",
    "one unreadable subscription stops a regular topic's coordination": "unit/scalable/test_regular.py::"
    "test_a_subscription_that_cannot_be_read_costs_the_others_nothing",
    "a member that does not answer is waited for without a timer": "unit/scalable/test_each_alone.py::"
    "test_a_member_that_does_not_answer_is_given_up_although_the_timer_was_early",
    "retention takes a segment with undecided writes": "unit/scalable/test_plans_topic.py::"
    "test_a_segment_with_an_undecided_write_is_not_pruned",
    "SUBSCRIBE with a rollback resets one segment": "unit/broker/test_segments.py::"
    "test_subscribing_with_a_rollback_resets_no_subscription_of_a_segment",
    "one unreadable registration stops the leader": "unit/scalable/test_upkeep.py::"
    "test_a_registration_that_cannot_be_read_costs_nobody_else_anything",
    "one unreadable cursor refuses its topic": "unit/broker/test_spoilt_records.py::"
    "test_one_record_of_nonsense_costs_what_it_is_about",
    "a segment that is younger than the known layout is taken for one that is gone": "unit/client/test_checkpoint_groups.py::"
    "test_an_assignment_may_come_before_its_layout",
    "a prune beside opening fails it": "unit/client/test_open_beside_prune.py::"
    "test_a_sealed_segment_pruned_between_the_layout_and_the_attachment",
    "a leader that comes back has the epoch it had": "../src/braid/testing/conformance/metadata_elections.py::"
    "test_only_candidate_comes_back_with_a_higher_epoch",
    "one session that cannot be told ends all": "unit/scalable/test_dag_watch.py::"
    "test_a_session_that_cannot_be_told_ends_and_the_others_go_on",
    "a stray cursor goes under who attaches to it": "unit/broker/test_segments.py::"
    "test_a_stray_cursor_that_somebody_attaches_to_is_not_removed_under_it",
    "what nobody has read goes with its ledger": "unit/managedledger/test_ml_retention.py::"
    "test_messages_without_a_subscription_stay_for_their_time",
    "a lost ledger is dropped from its log": "unit/managedledger/test_ml_lost.py::test_a_log_with_a_lost_ledger_is_refused",
    "an empty log is deleted by whoever loads it": "unit/broker/test_segments.py::"
    "test_an_empty_log_is_deleted_only_while_no_operation_can_need_it",
    "a nearly full disk flaps and keeps payloads": "unit/ledger/test_local_nearly_full.py::"
    "test_resuming_needs_more_room_than_refusing",
    "own sequence ids are forgotten at a split": "unit/client/test_producer_own_ids.py::"
    "test_what_a_parent_stored_is_not_stored_again",
    "a ledger that a record may name is deleted": "unit/managedledger/test_ml_in_doubt.py::"
    "test_a_new_ledger_stays_that_the_next_owner_may_have_found_in_the_record",
    "an operation written late stays unfinished": "unit/scalable/test_plans_topic.py::"
    "test_an_operation_on_a_subscription_that_comes_into_its_record_late_is_done",
    "the record of a checkpoint group stays": "unit/scalable/test_upkeep.py::"
    "test_a_group_without_members_ends_although_nobody_asks_for_anything",
    "the patience of one ends that of all, on regular topics": "unit/scalable/test_regular.py::"
    "test_one_whose_patience_ended_does_not_shorten_that_of_others",
    "materialising reads the acknowledgments of all transactions": "unit/txn/test_ack_costs.py::"
    "test_materialising_reads_no_more_than_what_is_materialised",
    "a cumulative acknowledgment walks entry by entry": "unit/broker/test_long_walks.py::"
    "test_a_cumulative_ack_around_holds_takes_no_step_for_each_entry",
    "many topics are trimmed in one turn of the loop": "unit/broker/test_long_walks.py::"
    "test_trimming_many_topics_lets_clients_have_their_turn",
    "the requests of one connection are begun in one turn": "unit/broker/test_connection_turns.py::"
    "test_many_requests_at_once_are_begun_in_several_turns",
    "a loop that does not turn says nothing": "unit/runtime/test_loop_watch.py::"
    "test_a_loop_that_is_held_says_where_it_stands_and_then_how_long",
    "two removals of a log leave the rest to each other": "unit/managedledger/test_ml_deletion.py::"
    "test_a_removal_is_finished_although_another_one_was_begun_and_given_up",
    "a member that was given up unawares sets its group back": "unit/client/test_checkpoint_groups.py::"
    "test_a_checkpoint_from_before_others_took_over_is_not_told",
    "a member whose broker was away reads again what others read": "unit/client/test_checkpoint_groups.py::"
    "test_a_member_whose_broker_was_away_goes_on_where_the_group_is",
    "partitions that are added begin at a member's start": "unit/scalable/test_handover.py::"
    "test_partitions_that_are_added_begin_at_their_beginning",
    "a group whose time is over goes on": "unit/scalable/test_handover.py::test_a_group_that_should_have_ended_begins_anew",
}
"""Repairs that no seed can be relied on to miss: what it takes is too rare here, or clients of the simulator do not do it."""
