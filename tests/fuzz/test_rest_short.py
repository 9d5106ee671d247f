"""The short run of the fuzzer of the admin API: a fixed seed and a fixed number of calls; `make fuzz` has the long one."""

from __future__ import annotations

import pytest
from tests.fuzz.rest_loop import RestFuzzer

EXAMPLES = 4


@pytest.mark.inv("INV17")
@pytest.mark.timeout(400)  # machines are shared
def test_every_answer_is_one_the_openapi_document_promises() -> None:
    fuzzer = RestFuzzer(1)
    fuzzer.run(examples=EXAMPLES, seconds=0, is_short=True)
    assert fuzzer.statuses.total() > 300
    assert fuzzer.statuses[200] + fuzzer.statuses[204] > 60, "too few calls got past the first check"
