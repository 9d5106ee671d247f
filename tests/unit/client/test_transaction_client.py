"""Transactions of the SDK and a scripted coordinator: finding one, beginning, ending, and answers that do not come."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from tests.unit.client.scripted_topic import QUICK, TOPIC, ScriptedTopic, served, until

import braid
from braid.client import Client, ClientConfig, Transaction
from braid.errors import (
    BraidError,
    Closed,
    DeadlineExceeded,
    InvalidArgument,
    InvalidTransactionStatus,
    MetadataFailure,
    NotAllowed,
    NotReady,
    Overloaded,
    StoreMismatch,
    TransactionConflict,
    TransactionCoordinatorNotFound,
    TransactionNotFound,
)
from braid.model.txn import TxnId
from braid.runtime.env import Runtime
from braid.testing.clock import ManualClock
from braid.wire.types import CommandType

# Coordinators.


@pytest.mark.req("R473-36")
async def test_coordinators_take_turns(client: Client, topic: ScriptedTopic) -> None:
    topic.transactions.count = 4
    for _ in range(8):
        await (await client.begin_transaction(timeout=2.5)).abort()
    numbers = [number for number, _ttl in topic.transactions.begun]
    assert sorted(numbers[:4]) == [0, 1, 2, 3]
    assert numbers[:4] == numbers[4:]
    assert {ttl for _number, ttl in topic.transactions.begun} == {2500}
    assert topic.seen[CommandType.WATCH_TC_ASSIGNMENTS] == 1


async def test_a_new_transaction_takes_the_next_coordinator_if_one_refuses(client: Client, topic: ScriptedTopic) -> None:
    coordinators = topic.transactions
    coordinators.count = 4
    coordinators.broken = {2: StoreMismatch("The record /txn-serial/2 cannot be read."), 3: Overloaded("Full.")}
    for _ in range(8):
        await client.begin_transaction()
    assert len(coordinators.begun) == 8
    assert {number for number, _ttl in coordinators.begun} == {0, 1}
    assert not any(one == other for one, other in pairwise(coordinators.asked))


async def test_a_transaction_that_no_coordinator_begins_is_refused_at_the_deadline(topic: ScriptedTopic) -> None:
    """Each is asked before there is a pause, and the error is one of theirs."""
    clock = ManualClock()
    topic.transactions.count = 3
    topic.transactions.broken = dict.fromkeys(range(3), StoreMismatch("The record /txn-serial/2 cannot be read."))
    async with braid.connect(topic.url, config=ClientConfig(operation_timeout=5), runtime=Runtime(clock=clock)) as client:
        beginning = asyncio.ensure_future(client.begin_transaction())
        await until(lambda: len(topic.transactions.asked) == 3)
        assert sorted(topic.transactions.asked) == [0, 1, 2]
        while not beginning.done():
            await clock.advance(0.5)
        with pytest.raises(MetadataFailure, match="/txn-serial/2 cannot be read"):
            await beginning
        assert len(topic.transactions.asked) < 60


async def test_a_coordinator_is_asked_where_it_is_and_a_left_out_one_where_it_was(topic: ScriptedTopic) -> None:
    async with served() as other, braid.connect(topic.url, config=QUICK) as client:
        here, there = topic.transactions, other.transactions
        here.places = {0: topic.url, 1: other.url}
        for _ in range(4):
            await client.begin_transaction()
        assert [number for number, _ in here.begun] == [0, 0]
        assert [number for number, _ in there.begun] == [1, 1]
        here.places = {0: other.url}  # nothing is said of 1
        here.tell()
        assert client.coordinators is not None
        await until(lambda: client.coordinators._urls[0] == other.url)
        for _ in range(2):
            await client.begin_transaction()
        assert sorted(number for number, _ in there.begun) == [0, 1, 1, 1]


async def test_a_broker_that_cannot_be_reached_is_replaced_by_any(client: Client, topic: ScriptedTopic) -> None:
    async with served() as gone:
        topic.transactions.places = {0: gone.url, 1: gone.url}
    txn = await client.begin_transaction()
    await txn.commit()
    assert txn.state == "COMMITTED"


async def test_the_watch_is_opened_again_after_a_lost_connection(client: Client, topic: ScriptedTopic) -> None:
    await client.begin_transaction()
    topic.crash()
    await until(lambda: topic.seen[CommandType.WATCH_TC_ASSIGNMENTS] == 2)


async def test_a_watch_that_is_ended_is_opened_again(client: Client, topic: ScriptedTopic) -> None:
    await client.begin_transaction()
    topic.transactions.refusal = NotReady("restarting")
    topic.transactions.tell()
    topic.transactions.refusal = None
    await until(lambda: topic.seen[CommandType.WATCH_TC_ASSIGNMENTS] == 2)


async def test_where_transactions_are_off_that_is_said(client: Client, topic: ScriptedTopic) -> None:
    topic.transactions.refusal = NotAllowed("Transactions are disabled here.")
    with pytest.raises(NotAllowed, match="disabled"):
        await client.begin_transaction()


async def test_coordinators_that_are_not_ready_are_waited_for(client: Client, topic: ScriptedTopic) -> None:
    topic.transactions.refusal = NotReady("starting")
    beginning = asyncio.ensure_future(client.begin_transaction())
    await until(lambda: topic.seen[CommandType.WATCH_TC_ASSIGNMENTS] >= 2)
    topic.transactions.refusal = None
    assert (await beginning).state == "OPEN"


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_coordinator_that_does_not_exist_is_not_waited_for(
    client: Client, topic: ScriptedTopic, is_known: bool
) -> None:
    topic.transactions.count = 4
    if is_known:
        await client.begin_transaction()
    topic.transactions.answers = [TransactionCoordinatorNotFound("Not here.")] * 2
    with pytest.raises(TransactionNotFound, match="coordinator 4; this cluster has coordinators 0 to 3"):
        await Transaction(client, TxnId(4, 1 << 20)).commit()
    topic.transactions.answers = [TransactionCoordinatorNotFound("Being elected.")]
    await Transaction(client, TxnId(3, 1 << 20)).commit()


# Ending.


async def test_commit_and_abort_can_be_repeated(client: Client, topic: ScriptedTopic) -> None:
    one, two = await client.begin_transaction(), await client.begin_transaction()
    await asyncio.gather(one.commit(), one.commit())
    await one.commit()
    await two.abort()
    await two.abort()
    assert topic.transactions.ended == [(one.id, "COMMIT"), (two.id, "ABORT")]
    with pytest.raises(InvalidTransactionStatus, match="committed"):
        await one.abort()
    with pytest.raises(InvalidTransactionStatus, match="aborted"):
        await two.commit()


async def test_nothing_is_done_under_a_transaction_that_is_over(client: Client, topic: ScriptedTopic) -> None:
    txn = await client.begin_transaction()
    await txn.commit()
    producer = await client.producer(TOPIC)
    for send in (producer.send, producer.send_nowait):
        with pytest.raises(InvalidTransactionStatus, match=f"{txn.id} is committed"):
            found = send(b"late", txn=txn)
            assert isinstance(found, asyncio.Future) is (send == producer.send_nowait)
            await found
    assert topic.count() == 0


@pytest.mark.inv("INV14")
async def test_an_end_without_an_answer_is_asked_for_again(client: Client, topic: ScriptedTopic) -> None:
    txn = await client.begin_transaction()
    topic.transactions.answers = ["lost", NotReady("moving"), None]
    await txn.commit()
    assert topic.transactions.ended == [(txn.id, "COMMIT")] * 3
    assert txn.state == "COMMITTED"


async def test_an_end_that_nobody_ever_answers_is_unknown_and_can_be_tried_again(topic: ScriptedTopic) -> None:
    clock = ManualClock()
    async with braid.connect(topic.url, config=QUICK, runtime=Runtime(clock=clock)) as client:
        txn = await client.begin_transaction()
        topic.transactions.answers = ["silent"]
        ending = asyncio.ensure_future(txn.commit())
        await topic.transactions.saw_end()
        await clock.advance(QUICK.operation_timeout)
        with pytest.raises(DeadlineExceeded, match=f"Whether transaction {txn.id} is committed is not known"):
            await ending
        assert txn.state == "UNKNOWN"
        await txn.commit()
        assert repr(txn) == f"<transaction {txn.id} COMMITTED>"


async def test_an_abort_that_nobody_answers_does_not_speak_of_a_commit(topic: ScriptedTopic) -> None:
    config = ClientConfig(backoff_initial=0.005, backoff_max=0.02, operation_timeout=0.3)
    async with braid.connect(topic.url, config=config) as client:
        txn = await client.begin_transaction()
        topic.transactions.answers = ["silent"]
        with pytest.raises(DeadlineExceeded, match=r"not known to be aborted.*call abort\(\) again") as raised:
            await txn.abort()
        assert "commit" not in str(raised.value)
        await txn.abort()
        assert txn.state == "ABORTED"


async def test_an_unknown_commit_that_was_one_cannot_be_aborted(topic: ScriptedTopic) -> None:
    config = ClientConfig(backoff_initial=0.005, backoff_max=0.02, operation_timeout=0.3)
    async with braid.connect(topic.url, config=config) as client:
        txn = await client.begin_transaction()
        topic.transactions.answers = ["silent", InvalidTransactionStatus("It is committed.")]
        with pytest.raises(DeadlineExceeded):
            await txn.commit()
        with pytest.raises(InvalidTransactionStatus, match="It is committed"):
            await txn.abort()
        assert txn.state == "COMMITTED"


async def test_a_commit_after_the_timeout_fails(client: Client, topic: ScriptedTopic) -> None:
    txn = await client.begin_transaction()
    topic.transactions.answers = [InvalidTransactionStatus("It is aborted.")]
    with pytest.raises(InvalidTransactionStatus, match="It is aborted"):
        await txn.commit()
    assert txn.state == "ABORTED"


@pytest.mark.parametrize(("answers", "state"), [([], "ABORTED"), (["lost"], "UNKNOWN")])
async def test_a_commit_of_a_forgotten_transaction(
    client: Client, topic: ScriptedTopic, answers: list[BraidError | str | None], state: str
) -> None:
    txn = await client.begin_transaction()
    topic.transactions.answers = [*answers, TransactionNotFound("There is no such transaction.")]
    with pytest.raises(TransactionNotFound):
        await txn.commit()
    assert txn.state == state  # after an attempt without an answer it may have been committed and collected


async def test_an_abort_of_a_forgotten_transaction_is_one(client: Client, topic: ScriptedTopic) -> None:
    txn = await client.begin_transaction()
    topic.transactions.answers = [TransactionNotFound("There is no such transaction.")]
    await txn.abort()
    assert txn.state == "ABORTED"


async def test_who_gives_up_waiting_leaves_no_transaction_half_ended(client: Client, topic: ScriptedTopic) -> None:
    txn = await client.begin_transaction()
    topic.transactions.answers = ["lost"]
    ending = asyncio.ensure_future(txn.commit())
    await topic.transactions.saw_end()
    ending.cancel()
    await topic.transactions.saw_end(2)
    await txn.commit()
    assert txn.state == "COMMITTED"
    assert len(topic.transactions.ended) == 2


async def test_closing_the_client_aborts_what_is_open(topic: ScriptedTopic) -> None:
    async with braid.connect(topic.url, config=QUICK) as client:
        one = await client.begin_transaction()
        two = await client.begin_transaction()
        await two.commit()
    assert topic.transactions.ended == [(two.id, "COMMIT"), (one.id, "ABORT")]
    with pytest.raises(Closed):
        await client.begin_transaction()


# The block.


async def test_a_block_commits_at_its_end(client: Client, topic: ScriptedTopic) -> None:
    async with client.transaction() as txn:
        assert txn.state == "OPEN"
        assert not topic.transactions.ended
    assert topic.transactions.ended == [(txn.id, "COMMIT")]


async def test_a_block_that_raises_aborts(client: Client, topic: ScriptedTopic) -> None:
    with pytest.raises(KeyError):
        async with client.transaction() as txn:
            raise KeyError
    assert topic.transactions.ended == [(txn.id, "ABORT")]


async def test_a_block_that_raises_says_so_even_if_the_abort_fails(client: Client, topic: ScriptedTopic) -> None:
    topic.transactions.answers = [NotAllowed("no")]
    with pytest.raises(KeyError):
        async with client.transaction():
            raise KeyError


async def test_a_cancelled_block_aborts(client: Client, topic: ScriptedTopic) -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with client.transaction():
            inside.set()
            await asyncio.Event().wait()

    working = asyncio.ensure_future(work())
    await inside.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert [action for _txn, action in topic.transactions.ended] == ["ABORT"]


@pytest.mark.parametrize("action", ["commit", "abort"])
async def test_a_block_in_which_the_application_ended_it_does_nothing_more(
    client: Client, topic: ScriptedTopic, action: str
) -> None:
    async with client.transaction() as txn:
        await getattr(txn, action)()
    assert topic.transactions.ended == [(txn.id, action.upper())]


async def test_a_block_whose_transaction_was_aborted_under_it_raises(client: Client, topic: ScriptedTopic) -> None:
    with pytest.raises(TransactionConflict, match="was aborted: The segment is lost") as raised:
        async with client.transaction() as txn:
            txn.doom(NotReady("The segment is lost."))
            await topic.transactions.saw_end()
    assert topic.transactions.ended == [(txn.id, "ABORT")]
    assert isinstance(raised.value.__cause__, NotReady)


async def test_a_block_under_which_the_client_is_closed_raises(topic: ScriptedTopic) -> None:
    client = await braid.connect(topic.url, config=QUICK).__aenter__()
    with pytest.raises(TransactionConflict, match="The client was closed before") as raised:
        async with client.transaction() as txn:
            await client.close()
    assert isinstance(raised.value.__cause__, Closed)
    assert topic.transactions.ended == [(txn.id, "ABORT")]


async def test_after_the_client_was_closed_without_a_connection_nothing_is_ended(topic: ScriptedTopic) -> None:
    client = await braid.connect(topic.url, config=QUICK).__aenter__()
    with pytest.raises(Closed, match="The client was closed before"):
        async with client.transaction() as txn:
            topic.crash()
            await until(lambda: not client.is_connected)
            await client.close()
    for end in (txn.commit, txn.abort):
        for _ in range(2):
            with pytest.raises(Closed, match="The client was closed before"):
                await end()


# Input.


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "5", True, 1e30, 10**400])
async def test_an_absurd_timeout_is_refused(client: Client, topic: ScriptedTopic, timeout: float) -> None:
    with pytest.raises(InvalidArgument, match="timeout="):
        await client.begin_transaction(timeout=timeout)
    with pytest.raises(InvalidArgument, match=r"above 0, up to .*max_timeout_seconds") as raised:
        async with client.transaction(timeout=timeout):
            pass
    assert len(str(raised.value)) < 300
    assert not topic.transactions.begun


async def test_the_default_timeout_is_an_option(topic: ScriptedTopic) -> None:
    async with braid.connect(topic.url, config=ClientConfig(transaction_timeout=7)) as client:
        await client.begin_transaction()
        await client.begin_transaction(timeout=0.0001)
    assert [ttl for _number, ttl in topic.transactions.begun] == [7000, 1]


async def test_what_is_no_transaction_is_refused(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC)
    for wrong in (5, "1_1048576", TxnId(1, 1 << 20), object(), client.transaction()):
        with pytest.raises(InvalidArgument, match="txn="):
            await producer.send(b"x", txn=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="txn="):
            producer.send_nowait(b"x", txn=wrong)  # type: ignore[arg-type]
    assert topic.count() == 0


async def test_a_transaction_says_which_it_is(client: Client, topic: ScriptedTopic) -> None:
    txn = await client.begin_transaction()
    assert isinstance(txn, Transaction)
    assert repr(txn) == f"<transaction {txn.id} OPEN>"
    assert TxnId.parse(str(txn.id)) == txn.id
