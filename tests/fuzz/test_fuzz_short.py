"""The short run of the fuzzer: a fixed number of inputs, a new seed in every run, printed when it fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random, SystemRandom

import pytest
from tests.fuzz.fuzz_loop import Fuzzer, Input, Problem, case, load, make_input, save

INPUTS = 800
SECONDS = 60.0
"""At most, on a machine with much else to do."""


@pytest.mark.inv("INV17")
@pytest.mark.parametrize("seed", [1, None])
def test_bad_peers_disturb_nobody(seed: int | None, tmp_path: Path) -> None:
    chosen = SystemRandom().randrange(1 << 32) if seed is None else seed
    fuzzer = Fuzzer(chosen)
    try:
        asyncio.run(fuzzer.run(SECONDS, INPUTS))
    except (AssertionError, ConnectionError) as error:
        saved = save(fuzzer, error, tmp_path)
        pytest.fail(f"seed {chosen}, input {fuzzer.count - 1}: {error}; the inputs are in {saved}")
    assert fuzzer.count > 100
    assert fuzzer.good_messages > 100
    assert fuzzer.half_open_closed > 0, "half-open connections were not closed"


def test_an_input_follows_from_its_seed_and_survives_saving(tmp_path: Path) -> None:
    fuzzer = Fuzzer(5)
    fuzzer.inputs = [make_input(5, number) for number in range(50)]
    assert fuzzer.inputs == [make_input(5, number) for number in range(50)]
    assert load(save(fuzzer, Problem("x"), tmp_path)) == (5, fuzzer.inputs)


def test_every_fixed_case_once(tmp_path: Path) -> None:
    """All cases of the protocol sheet 1.9, and the fuzzer notices a wrong answer."""
    cases: dict[str, Input] = {}
    for number in range(2000):
        one = case(Random(number), number)
        cases.setdefault(one.kind, one)
    assert len(cases) >= 28
    fuzzer = Fuzzer(0)
    asyncio.run(fuzzer.run(0, replay=list(cases.values())))
    wrong = Input(0, "wrong", cases["case: unknown command"].pieces, "close")
    with pytest.raises(Problem, match=r"neither closed nor|expected close"):
        asyncio.run(Fuzzer(0).run(0, replay=[wrong]))
