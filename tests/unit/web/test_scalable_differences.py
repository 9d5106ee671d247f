"""The answers that docs/reference/differences.md says calls about scalable topics have: as Pulsar's, and not."""

from __future__ import annotations

import httpx

from braid.testing.broker import BackgroundBroker

TOPIC = "/admin/v2/scalable/public/default"
SEGMENT = "/admin/v2/segments/public/default/t/8000-ffff-1"
UNKNOWN = "/admin/v2/segments/public/default/t/9000-ffff-9"
ANSWERS = [
    # As Pulsar.
    ("PUT", f"{TOPIC}/t?numInitialSegments=2", 204),
    ("PUT", f"{TOPIC}/t", 409),
    ("PUT", f"{TOPIC}/u?numInitialSegments=0", 412),
    ("GET", TOPIC, 200),
    ("GET", f"{TOPIC}?property=k", 412),
    ("GET", f"{TOPIC}/t", 200),
    ("GET", f"{TOPIC}/nope", 404),
    ("GET", f"{TOPIC}/t/stats", 200),
    ("PUT", f"{TOPIC}/t/subscriptions/s", 204),
    ("PUT", f"{TOPIC}/t/subscriptions/s", 204),
    ("POST", f"{TOPIC}/t/subscriptions/s/seek?timestamp=0", 204),
    ("POST", f"{TOPIC}/t/subscriptions/s/skip-all", 204),
    ("PUT", SEGMENT, 204),
    ("PUT", f"{SEGMENT}/subscription/s", 204),
    ("GET", f"{SEGMENT}/subscription/s/backlog", 200),
    ("GET", f"{SEGMENT}/subscription/none/backlog", 404),
    ("POST", f"{SEGMENT}/subscription/none/seek?timestamp=1", 404),
    ("POST", f"{UNKNOWN}/terminate", 404),
    ("POST", f"{TOPIC}/t/split/0", 204),
    ("POST", f"{TOPIC}/t/merge/2/3", 204),
    # Otherwise.
    ("GET", "/admin/v2/scalable-topics/public/default", 200),
    ("PUT", f"{TOPIC}/regular", 409),
    ("PUT", f"{TOPIC}/a-partition-1", 412),
    ("PUT", f"{TOPIC}/u?numInitialSegments=1025", 412),
    ("PUT", f"{TOPIC}/t/subscriptions/s?type=QUEUE", 409),
    ("PUT", f"{TOPIC}/t/subscriptions/c?type=CHECKPOINT&initial=latest", 204),
    ("DELETE", f"{TOPIC}/t/subscriptions/none", 404),
    ("POST", f"{TOPIC}/t/subscriptions/none/seek?timestamp=0", 404),
    ("POST", f"{TOPIC}/t/split/9", 404),
    ("POST", f"{TOPIC}/t/split/0", 412),
    ("POST", f"{TOPIC}/t/merge/1/0", 412),
    ("POST", f"{TOPIC}/t/migrate", 501),
    ("GET", f"{TOPIC}/t/autoScalePolicy", 501),
    ("POST", f"{SEGMENT}/terminate", 412),
    ("DELETE", SEGMENT, 412),
    ("DELETE", UNKNOWN, 404),
    ("POST", f"{UNKNOWN}/subscription/s/skip-all", 404),
    ("GET", f"{SEGMENT}/stats", 200),
    ("GET", f"{SEGMENT}/subscriptions", 200),
    ("POST", f"{SEGMENT}/terminate?force=true", 200),
    ("DELETE", f"{TOPIC}/t?force=true", 204),
    ("DELETE", f"{TOPIC}/t", 404),
]


def test_the_answers_are_those_of_the_reference() -> None:
    with BackgroundBroker() as broker, httpx.Client(base_url=broker.http_url, timeout=30) as http:
        http.put("/admin/v2/persistent/public/default/regular").raise_for_status()
        found = [(method, path, http.request(method, path).status_code) for method, path, _status in ANSWERS]
    assert found == ANSWERS


def test_what_pulsar_shows_is_shown_and_more() -> None:
    with BackgroundBroker() as broker, httpx.Client(base_url=broker.http_url, timeout=30) as http:
        http.put(f"{TOPIC}/t", json={"k": "v"}).raise_for_status()
        http.put(f"{TOPIC}/t/subscriptions/s").raise_for_status()
        layout, stats = http.get(f"{TOPIC}/t").json(), http.get(f"{TOPIC}/t/stats").json()
    assert {"epoch", "nextSegmentId", "segments", "properties"} <= set(layout)
    assert {"routing", "incarnation", "leaderEpoch", "formatVersion"} <= set(layout)
    assert set(layout["segments"]["0"]) == {
        *("segmentId", "hashRange", "state", "parentIds", "childIds"),
        *("createdAtEpoch", "sealedAtEpoch", "createdAtMs", "sealedAtMs"),
        *("sealed", "active", "root", "leaf", "legacy"),
    }
    assert {"epoch", "totalSegments", "activeSegments", "sealedSegments", "segments", "subscriptions"} <= set(stats)
    assert {"name", "state", "owner", "msgRateIn", "backlog", "isTerminated"} <= set(stats["segments"]["0"])
    assert {"consumerCount", "type", "state", "backlog", "blocked_by"} <= set(stats["subscriptions"]["s"])
