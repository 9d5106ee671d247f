"""Random calls of the admin API, made by schemathesis from the broker's own OpenAPI document.

Each call is one the document allows, or one it forbids in some place; half of the names in paths are those of things that
exist, so that calls get past the first check. The answer must be one the document promises: status, content type, shape; never
a failure of the server. One seed makes one run: `python tests/fuzz/rest_loop.py --seconds 300 [--seed n]`.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from random import SystemRandom
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from braid.testing.broker import BackgroundBroker

CHECKS: list[Any] = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
KNOWN = {
    "tenant": "public",
    "namespace": "default",
    "topic": "t",
    "subscription": "s",
    "cluster": "standalone",
    "bundle": "0x00000000_0x40000000",
}
HARMFUL = ("delete_namespaces_tenant_namespace", "delete_tenants_tenant", "delete_persistent_tenant_namespace_topic")
"""Calls that would take away what the others need: never with names that exist."""


class RestFuzzer:
    """One broker, and calls to it."""

    def __init__(self, chosen: int) -> None:
        self.seed = chosen
        self.statuses: Counter[int] = Counter()

    def run(self, *, examples: int, seconds: float, is_short: bool = False) -> None:
        """`examples` calls of each kind for each operation, again and again with other seeds until the time is over; in a short
        run every operation has calls of one kind only, in turns."""
        with BackgroundBroker() as broker, requests.Session() as session:
            url = broker.http_url
            for path in ("", "/subscription/s"):
                session.put(f"{url}/admin/v2/persistent/public/default/t{path}", timeout=10).raise_for_status()
            schema = schemathesis.openapi.from_dict(session.get(f"{url}/openapi.json", timeout=10).json())
            operations: list[Any] = [found.ok() for found in schema.get_all_operations()]  # type: ignore[union-attr]
            ends, number = time.monotonic() + seconds, 0
            while not number or time.monotonic() < ends:
                for turn, operation in enumerate(operations):
                    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
                    for mode in [modes[turn % 2]] if is_short else modes:
                        self._calls(operation, mode, url, session, examples, self.seed + number)
                number += 1

    def _calls(self, operation: Any, mode: Any, url: str, session: requests.Session, examples: int, chosen: int) -> None:
        operation_id = operation.definition.raw["operationId"]
        may_know = operation_id not in HARMFUL and "drain" not in operation_id

        @seed(chosen)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode), known=st.sets(st.sampled_from(sorted(KNOWN)), min_size=2))
        def call(case: Any, known: set[str]) -> None:
            if may_know:
                for name in known & set(case.path_parameters or {}):
                    case.path_parameters[name] = KNOWN[name]
            try:
                response = case.call(base_url=url, session=session, timeout=10, allow_redirects=False)
            except (requests.exceptions.InvalidURL, requests.exceptions.InvalidHeader, UnicodeError):
                return  # what the HTTP library itself cannot send
            self.statuses[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        try:
            call()
        except Unsatisfiable:
            return  # nothing about this call can be wrong


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=300)
    options.add_argument("--examples", type=int, default=20)
    options.add_argument("--seed", type=int, default=SystemRandom().randrange(1 << 32))
    given_ = options.parse_args()
    print(f"seed {given_.seed}", flush=True)
    fuzzer = RestFuzzer(given_.seed)
    fuzzer.run(examples=given_.examples, seconds=given_.seconds)
    print(f"{fuzzer.statuses.total()} calls, by status: {dict(sorted(fuzzer.statuses.items()))}")


if __name__ == "__main__":
    main()
