"""What bad input gets: every value of the security sheet's table, sent to every call that takes such a value.

The calls come from the broker's own OpenAPI document, so a new one is covered when it is added. Each answer must be a refusal
with a reason, in time; what the metadata holds must be the same afterwards, and the log must show no failure.
"""

from __future__ import annotations

import gzip
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest

import braid
from braid.errors import BraidError
from braid.testing.broker import BackgroundBroker

ROOT = "/admin/v2"
TOPIC = f"{ROOT}/persistent/public/default/t"
SCALABLE = f"{ROOT}/scalable/public/default/scaled"
JSON = {"content-type": "application/json"}
GOOD = {
    "cluster": "standalone",
    "tenant": "public",
    "namespace": "default",
    "topic": "t",
    "subscription": "s",
    "bundle": "0x00000000_0x40000000",
    "broker": "nobody:1",
    "role": "r",
    "key": "k",
    "value": "v",
    "name": "x",
    "policy": "messageTTL",
    "topic_policy": "messageTTL",
    "domain": "persistent",
    "timestamp": "0",
    "seconds": "1",
    "count": "1",
    "position": "1",
    "ledger": "0",
    "entry": "0",
    "descriptor": "0000-7fff-0",
    "segment": "0",
    "other": "1",
}
WORDS = ("tenant", "namespace", "cluster")
"""Names of letters, digits and - = : . _ only."""

# Row "Names". Values no name of any kind may have, then those that only some names may not have.
NOWHERE = [" ", "\t", "\0", "\n", "a\nb", "a\0b", "\u202eabc", "a\u200bb", "e\u0301", "x" * 3000, "\ud800", "\x7f"]
NOT_AS_WORDS = [
    ".",
    "..",
    " a",
    "a ",
    "/",
    "a/b",
    "%2F",
    "\\",
    "'",
    '"',
    "<script>",
    "é",
    "a b",
    "orders/0000-7fff-3",
    "a?b",
    "a#b",
]
NOT_AS_ANY_NEW = [" a", "a ", ".", "..", "%2F", "a%2Fb", "\\", "a'b", 'a"b', "<script>", "x" * 300]
NOT_AS_TOPICS = [*NOT_AS_ANY_NEW, "/", "a/b", "__a", "_braid.a", "a-partition-3", "orders/0000-7fff-3"]
NOT_AS_SUBSCRIPTIONS = NOT_AS_ANY_NEW
NOT_UTF8 = "%ff"
# Row "Numbers".
NUMBERS = [
    "-1",
    "-0",
    str(1 << 63),
    str(1 << 64),
    "9" * 400,
    "1.5",
    "1e3",
    "x",
    "0x10",
    "+1",
    " 1",
    "1_000",
    "١",
    "NaN",
    "true",
    "%00",
]


class Raw:
    """HTTP without a library's opinion on paths: one connection, kept while it lasts."""

    def __init__(self, url: str) -> None:
        self.host, _, port = url.removeprefix("http://").rpartition(":")
        self.port = int(port)
        self._connection = http.client.HTTPConnection(self.host, self.port, timeout=10)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        is_kept = self._connection.sock is not None
        try:
            self._connection.request(method, path, body, headers or {})
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except BaseException as error:
            self._connection.close()
            if is_kept and isinstance(error, http.client.RemoteDisconnected):  # idle for too long, as the server sees it
                return self.ask(method, path, body, headers)
            raise

    def close(self) -> None:
        self._connection.close()

    def json(self, path: str) -> Any:
        return json.loads(self.ask("GET", path)[1])

    def bytes(self, request: bytes, seconds: float = 10) -> bytes:
        """Everything the server says to these bytes until it closes or falls silent."""
        with socket.create_connection((self.host, self.port), timeout=seconds) as link:
            try:
                link.sendall(request)
                link.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it closed early, and may have said why
            return read_all(link)


def read_all(link: socket.socket) -> bytes:
    got = b""
    try:
        while part := link.recv(65536):
            got += part
    except ConnectionResetError:
        pass
    return got


def once(broker: BackgroundBroker, method: str, path: str, body: bytes | None = None) -> int:
    """The status of one request on a connection of its own."""
    client = Raw(broker.http_url)
    try:
        return client.ask(method, path, body, JSON)[0]
    finally:
        client.close()


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


@pytest.fixture(scope="module")
def raw(broker: BackgroundBroker) -> Iterator[Raw]:
    found = Raw(broker.http_url)
    assert found.ask("PUT", TOPIC)[0] == 204
    assert found.ask("PUT", f"{TOPIC}/subscription/s")[0] == 204
    assert found.ask("PUT", f"{SCALABLE}?numInitialSegments=2")[0] == 204
    assert found.ask("PUT", f"{SCALABLE}/subscriptions/s")[0] == 204
    yield found
    found.close()


@pytest.fixture(scope="module")
def document(raw: Raw) -> dict[str, Any]:
    return dict(raw.json("/openapi.json"))


@pytest.fixture(autouse=True)
def nothing_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.ERROR, logger="braid"):
        yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield method.upper(), path, operation


def filled(path: str, name: str, value: str) -> str:
    """The path with one bad part, percent-encoded unless it says otherwise, and good others."""
    encoded = value if value.startswith("%") else quote(value, safe="", errors="surrogatepass")
    if name != "topic" and path.startswith((f"{ROOT}/scalable/", f"{ROOT}/segments/")):
        path = path.replace("{topic}", "scaled")
    for part, good in GOOD.items():
        path = path.replace(f"{{{part}}}", encoded if part == name else quote(good, safe=""))
    return path


def persisted(raw: Raw) -> Any:
    """Everything an administrator can list."""
    return {
        path: raw.json(f"{ROOT}{path}")
        for path in (
            "/clusters",
            "/tenants",
            "/namespaces/public",
            "/namespaces/public/default",
            "/persistent/public/default",
            "/persistent/public/default/partitioned",
            "/persistent/public/default/t/subscriptions",
            "/persistent/public/default/t/properties",
            "/persistent/public/default/t/subscription/s/properties",
            "/scalable/public/default",
            "/scalable/public/default/scaled",
            "/segments/public/default/scaled/0000-7fff-0/subscriptions",
        )
    }


def example(operation: dict[str, Any]) -> bytes | None:
    """A body the call could take, so that nothing but the bad part is wrong."""
    body = operation.get("requestBody")
    if body is None:
        return None
    schema = body["content"]["application/json"]["schema"]
    text = json.dumps(schema)
    for word, good in (
        ("AutoSub", b'{"allowAutoSubscriptionCreation": true}'),
        ("TenantInfo", b'{"allowedClusters": ["standalone"]}'),
        ("MessageId", b'{"ledgerId": -1, "entryId": -1}'),
        ("Partitioned", b"1"),
        ("SegmentBeginning", b"[]"),
    ):
        if word in text:
            return good
    kind = schema.get("type", "object")
    return {"array": b"[]", "string": b'"FULL"', "boolean": b"true", "object": b"{}", "integer": b"1"}.get(kind, b"{}")


def refused(status: int, body: bytes) -> str:
    """A refusal has a status of its own and says why."""
    assert 400 <= status < 500, (status, body[:300])
    reason = json.loads(body)["reason"]
    assert isinstance(reason, str) and reason and "Traceback" not in reason and len(reason) < 1500
    return reason


@pytest.mark.parametrize("part", ["cluster", "tenant", "namespace", "topic", "subscription", "bundle", "role", "descriptor"])
def test_bad_names_are_refused_by_every_call_and_nothing_is_kept(raw: Raw, document: dict[str, Any], part: str) -> None:
    values = [*NOWHERE, NOT_UTF8]
    values += NOT_AS_WORDS if part in WORDS or part in ("bundle", "descriptor") else []
    values += NOT_AS_SUBSCRIPTIONS if part == "subscription" else []
    if part == "role":
        values = [" ", "\t", "\0", "a\nb", "x" * 3000, NOT_UTF8]
    before = persisted(raw)
    asked = 0
    for method, path, operation in operations(document):
        if f"{{{part}}}" not in path:
            continue
        for value in values:
            status, body = raw.ask(method, filled(path, part, value), example(operation), JSON)
            allowed = (400, 404, 405, 412) if method == "GET" or part in ("bundle", "role") else (400, 405, 412)
            assert status in allowed or (part == "cluster" and status == 404), (method, path, value[:20], status, body[:200])
            refused(status, body)
            asked += 1
    assert asked >= len(values)
    assert persisted(raw) == before


@pytest.mark.parametrize("value", [*NOWHERE, *NOT_AS_TOPICS, NOT_UTF8])
def test_topics_of_bad_names_are_not_made_by_either_protocol(raw: Raw, broker: BackgroundBroker, value: str) -> None:
    before = persisted(raw)
    encoded = value if value.startswith("%") else quote(value, safe="", errors="surrogatepass")
    for path, body in (("", None), ("/partitions", b"1")):
        status, answer = raw.ask("PUT", f"{ROOT}/persistent/public/default/{encoded}{path}", body, JSON)
        assert status == 412, answer
        refused(status, answer)

    async def produce() -> None:
        async with braid.connect(broker.service_url) as client:
            await client.producer(f"persistent://public/default/{value}")

    if value not in (
        NOT_UTF8,
        "\ud800",
        "a-partition-3",
    ):  # the binary protocol takes a partition without its topic for a topic
        with pytest.raises(BraidError):
            broker.run(produce())
    assert persisted(raw) == before


@pytest.mark.parametrize("value", [*NOWHERE, *NOT_AS_SUBSCRIPTIONS, "", "pulsar.repl.x", "__compaction"])
def test_subscriptions_of_bad_names_are_not_made_by_either_protocol(raw: Raw, broker: BackgroundBroker, value: str) -> None:
    before = persisted(raw)
    status, answer = raw.ask("PUT", f"{TOPIC}/subscription/{quote(value, safe='', errors='surrogatepass')}")
    assert status == (404 if value == "" else 412), answer

    async def consume() -> None:
        async with braid.connect(broker.service_url) as client:
            await client.consumer("t", value)

    if value != "\ud800":
        with pytest.raises(BraidError):
            broker.run(consume())
    assert persisted(raw) == before


@pytest.mark.parametrize("name", ["{}", "$(id)", "; DROP TABLE x; --", "100%", "é", "...", "a b"])
def test_strange_but_visible_names_are_names_like_any_other(raw: Raw, name: str) -> None:
    """Stored, listed, shown as JSON or inside a quoted label, and deleted again; never interpreted."""
    path = f"{ROOT}/persistent/public/default/{quote(name, safe='').replace('.', '%2E')}"
    assert raw.ask("PUT", path)[0] == 204
    assert f"persistent://public/default/{name}" in raw.json(f"{ROOT}/persistent/public/default")
    assert raw.ask("PUT", f"{path}/subscription/{quote(name, safe='').replace('.', '%2E')}")[0] == 204
    status, stats = raw.ask("GET", f"{path}/stats")
    assert status == 200 and list(json.loads(stats)["subscriptions"]) == [name]
    metrics = raw.ask("GET", "/metrics")[1].decode()
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    assert f'subscription="{quoted}"' in metrics
    assert raw.ask("DELETE", f"{path}?force=true")[0] == 204


@pytest.mark.parametrize("part", ["timestamp", "seconds", "count", "position", "ledger", "entry", "segment", "other"])
def test_bad_numbers_in_paths(raw: Raw, document: dict[str, Any], part: str) -> None:
    before = persisted(raw)
    for method, path, operation in operations(document):
        if f"{{{part}}}" in path:
            for value in [*NUMBERS, *(["0"] if part in ("count", "position") else [])]:
                status, body = raw.ask(method, filled(path, part, value), example(operation), JSON)
                assert status == 400, (path, value[:20], status, body[:200])
                refused(status, body)
    assert persisted(raw) == before


def test_bad_values_of_every_query_parameter(raw: Raw, document: dict[str, Any]) -> None:
    before = persisted(raw)
    bad = {"boolean": ["maybe", "1", "yes", "%00", "tru"], "integer": NUMBERS[:8], "string": ["x" * 5000, "%00", "<script>"]}
    for method, path, operation in operations(document):
        for parameter in operation.get("parameters", []):
            if parameter["in"] != "query":
                continue
            schema = parameter["schema"]
            if schema["type"] == "array":
                schema = schema["items"]
            for value in bad[schema["type"]]:
                if schema["type"] == "integer" and value == "-1" and schema["minimum"] < 0:
                    continue  # a number all the same; what it means is not for the syntax to say
                asked = f"{filled(path, '', '')}?{parameter['name']}={value.replace(' ', '%20').replace('١', '%D9%A1')}"
                status, body = raw.ask(method, asked, example(operation), JSON)
                if schema["type"] == "string" and "enum" not in schema and len(value) < 100:
                    assert status < 500, (asked, status)  # a name of something that is not there, or of no interest
                else:
                    assert status == 400, (method, asked[:200], status, body[:200])
                    refused(status, body)
    status, body = raw.ask("DELETE", f"{TOPIC}?force=true&force=false")
    assert status == 400 and "2 times" in refused(status, body)
    assert persisted(raw) == before


BODIES: dict[str, bytes] = {
    "cut off": b'{"a"',
    "not JSON": b"nonsense",
    "not UTF-8": b'"\xff\xfe"',
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "two values": b"1 2",
    "NaN": b"NaN",
    "a huge number": b"1e999",
    "a number of many digits": b"9" * 5000,
    "a NUL": b'"\\u0000',
    "a lone surrogate": b'{"\\ud800": ',
    "nothing but blanks and a comma": b" , ",
}


@pytest.mark.parametrize("what", list(BODIES))
def test_bad_bodies_are_refused_by_every_call_that_takes_one(raw: Raw, document: dict[str, Any], what: str) -> None:
    before = persisted(raw)
    for method, path, operation in operations(document):
        if "requestBody" in operation:
            status, body = raw.ask(method, filled(path, "", ""), BODIES[what], JSON)  # times out if it takes long
            assert status in (400, 406), (method, path, status, body[:200])
            refused(status, body)
    assert persisted(raw) == before


def test_keys_given_twice_unknown_fields_and_keys_of_other_languages(raw: Raw) -> None:
    before = persisted(raw)
    namespace = f"{ROOT}/namespaces/public/default"
    for method, path, body in (
        (
            "POST",
            f"{namespace}/retention",
            b'{"retentionTimeInMinutes": 1, "retentionTimeInMinutes": 2, "retentionSizeInMB": 1}',
        ),
        ("POST", f"{namespace}/retention", b'{"retentionTimeInMinutes": 1, "retentionSizeInMB": 1, "retentionSizeInGB": 1}'),
        ("POST", f"{TOPIC}/retention", b'{"retentionTimeInMinutes": 1, "retentionSizeInMB": 1, "retentionSizeInGB": 1}'),
        ("POST", f"{SCALABLE}/retention", b'{"retentionTimeInMinutes": "soon", "retentionSizeInMB": 1}'),
        ("PUT", f"{ROOT}/tenants/new", b'{"allowedClusters": ["standalone"], "allowedCluster": []}'),
        ("PUT", f"{ROOT}/namespaces/public/new", b'{"properties": {"a": "1", "a": "2"}}'),
        ("PUT", f"{TOPIC}2", b'{"a": {"b": "c"}}'),
        ("PUT", f"{SCALABLE}2", b'{"a": {"b": "c"}}'),
        ("PUT", f"{SCALABLE}2", b'{"a": "1", "a": "2"}'),
        ("PUT", f"{ROOT}/segments/public/default/scaled/0000-7fff-0", b'{"subscriptions": [], "subscription": []}'),
        ("POST", f"{namespace}/autoTopicCreation", b'{"__proto__": {}, "allowAutoTopicCreation": true}'),
    ):
        status, answer = raw.ask(method, path, body, JSON)
        assert status == 400, (path, body, answer)
        refused(status, answer)
    assert persisted(raw) == before
    # A property is a property, whatever it means to others.
    assert raw.ask("PUT", f"{TOPIC}/properties", b'{"__proto__": "x", "constructor": "y"}', JSON)[0] == 204
    assert raw.json(f"{TOPIC}/properties") == {"__proto__": "x", "constructor": "y"}
    for key in ("__proto__", "constructor"):
        assert raw.ask("DELETE", f"{TOPIC}/properties?key={key}")[0] == 204


def test_wrong_content_types_and_compressed_bodies(raw: Raw, document: dict[str, Any]) -> None:
    before = persisted(raw)
    bomb = gzip.compress(b"[" * (64 << 20))
    for method, path, operation in operations(document):
        if "requestBody" not in operation:
            continue
        where, good = filled(path, "", ""), example(operation)
        for kind in (
            "text/plain",
            "application/xml",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "j",
        ):
            status, body = raw.ask(method, where, good, {"content-type": kind})
            assert status == 415, (method, path, kind, status)
            refused(status, body)
        status, body = raw.ask(method, where, bomb, JSON | {"content-encoding": "gzip"})
        assert status == 415, (method, path, status)
    assert persisted(raw) == before
    assert (
        raw.ask("PUT", f"{ROOT}/namespaces/public/typed", b"{}", {"content-type": "application/json; charset=utf-8"})[0] == 204
    )
    assert raw.ask("DELETE", f"{ROOT}/namespaces/public/typed")[0] == 204


# Row "HTTP".


def test_wrong_verbs_on_every_path(raw: Raw, document: dict[str, Any]) -> None:
    before = persisted(raw)
    for path, item in document["paths"].items():
        where = filled(path, "", "")
        for verb in ("PATCH", "TRACE", "PROPFIND", "CONNECT", "get", "FOO" * 20):
            status, body = raw.ask(verb, where)
            assert status in (400, 405), (verb, where, status)
        status, _body = raw.ask("OPTIONS", where)
        assert status in (204, 405), (where, status)
        status, body = raw.ask("HEAD", where)
        assert body == b"" and status < 500, (where, status)
        if not {"get"} & set(item) and "{policy}" not in path and "{topic}" not in path:
            assert status == 405, where
    assert persisted(raw) == before


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"//admin/v2/tenants", 404),
        (b"/admin//v2/tenants", 404),
        (b"/admin/v2//tenants", 404),
        (b"/admin/v2/tenants//", 404),
        (b"/admin/v2/namespaces//x", 404),
        (b"http://elsewhere/admin/v2/tenants", 200),
        (b"HTTP://elsewhere:1/admin/v2/nowhere", 501),
        (b"http://elsewhere", 404),
        (b"*", 400),
        (b"elsewhere:80", 400),
        (b"/../../etc/passwd", 404),
        (b"/admin/v2/../v2/tenants", 501),
        (b"/admin/v2/tenants?" + b"x" * 5000, 200),
        (b"/admin/v2/tenants#fragment", 501),
        (b"/admin/v2/tenants/%zz", 412),
        (b"/admin/v2/tenants/%", 412),
    ],
)
def test_strange_targets(raw: Raw, target: bytes, status: int) -> None:
    answer = raw.bytes(b"GET " + target + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:300]


LINE = b"PUT /admin/v2/tenants/smuggled HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
SMUGGLED = b"DELETE /admin/v2/persistent/public/default/t?force=true HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    "request_",
    [
        LINE + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        LINE + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n" + SMUGGLED,
        LINE + b"content-length: 0\r\ncontent-length: 90\r\n\r\n" + SMUGGLED,
        LINE + b"content-length: 0, 90\r\n\r\n" + SMUGGLED,
        LINE + b"content-length: -1\r\n\r\n" + SMUGGLED,
        LINE + b"content-length: +5\r\n\r\n" + SMUGGLED,
        LINE + b"content-length: 0x5\r\n\r\n" + SMUGGLED,
        LINE + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        LINE + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
        LINE + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        LINE + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        LINE + b"transfer-encoding: chunked\r\n\r\nzz\r\n\r\n" + SMUGGLED,
        LINE + b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n" + SMUGGLED,
        LINE + b"x: y\r\n z\r\ncontent-length: 0\ncontent-length: 90\r\n\r\n" + SMUGGLED,
        LINE + b"content-length: 5\r\n\r\n",
        b"PUT /admin/v2/tenants/smuggled HTTP/1.1\r\n\r\n" + SMUGGLED,
        b"PUT /admin/v2/tenants/smuggled\r\n\r\n" + SMUGGLED,
        b"PUT  /admin/v2/tenants/smuggled HTTP/1.1\r\nhost: x\r\n\r\n" + SMUGGLED,
        b"PUT /admin/v2/tenants/smug gled HTTP/1.1\r\nhost: x\r\n\r\n" + SMUGGLED,
        b"PUT /admin/v2/tenants/\x01 HTTP/1.1\r\nhost: x\r\n\r\n" + SMUGGLED,
        b"PUT /admin/v2/tenants/smuggled HTTP/9.9\r\nhost: x\r\n\r\n" + SMUGGLED,
        LINE + b"a\x00b: c\r\n\r\n" + SMUGGLED,
        LINE + b"bad header\r\n\r\n" + SMUGGLED,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
        b"\x00\x00\x00\x10" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_no_request_hides_in_another(raw: Raw, request_: bytes) -> None:
    before = persisted(raw)
    answer = raw.bytes(request_)
    if answer:
        assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501", b"HTTP/1.1 505")), answer[:200]
        assert answer.count(b"HTTP/1.1 ") == 1, answer
    assert persisted(raw) == before
    assert raw.json(f"{ROOT}/tenants") == before["/tenants"]


def test_oversized_headers_and_lines(raw: Raw) -> None:
    for request in (
        b"GET /admin/v2/tenants HTTP/1.1\r\nhost: x\r\nbig: " + b"x" * (1 << 20) + b"\r\n\r\n",
        b"GET /admin/v2/tenants HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 200_000 + b"\r\n",
        b"GET /" + b"x" * (1 << 20) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    ):
        answer = raw.bytes(request)
        assert not answer or answer.split()[1] in (b"400", b"414", b"431"), answer[:200]
    assert raw.ask("GET", f"{ROOT}/brokers/health")[0] == 200


def test_a_gigabyte_that_is_announced_is_refused_before_it_comes(raw: Raw) -> None:
    before = persisted(raw)
    with socket.create_connection((raw.host, raw.port), timeout=10) as link:
        link.sendall(LINE + b"content-length: 1073741824\r\n\r\n[")
        answer = link.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413 "), answer
        sent, began = 0, time.monotonic()
        try:
            while time.monotonic() - began < 10:
                sent += link.send(b"x" * 65536)
        except OSError:
            pass
        assert sent < 64 << 20, "the server took what it had refused"
    assert persisted(raw) == before


def test_a_body_in_chunks_without_end_is_cut_off(raw: Raw) -> None:
    before = persisted(raw)
    with socket.create_connection((raw.host, raw.port), timeout=10) as link:
        link.sendall(LINE + b"transfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        sent, began = 0, time.monotonic()
        try:
            while time.monotonic() - began < 10:
                sent += link.send(chunk)
        except OSError:
            pass
        assert sent < 64 << 20
        assert read_all(link)[:13] in (b"HTTP/1.1 413 ", b"")
    assert persisted(raw) == before


@pytest.mark.parametrize(
    "begun", [b"", b"G", b"GET /admin/v2/tenants HTTP/1.1\r\nhost: x\r\n", LINE + b"content-length: 9\r\n\r\n[1,"]
)
def test_a_client_that_never_ends_its_request_is_dropped(broker: BackgroundBroker, begun: bytes) -> None:
    from braid.runtime.env import Runtime
    from braid.web.admin import Admin
    from braid.web.app import make_app
    from braid.web.http import HttpServer

    async def serve() -> tuple[HttpServer, int]:
        node = broker.broker.nodes[0]
        app = make_app(Admin(node.service, node.server, lambda: True))
        server = HttpServer(Runtime(), app, "localhost", 0, read_seconds=0.2)
        await server.__aenter__()
        return server, server.port

    server, port = broker.run(serve())
    try:
        with socket.create_connection(("localhost", port), timeout=10) as link:
            link.sendall(begun)
            dripping = threading.Thread(target=drip, args=(link,), daemon=True)
            if begun.startswith(b"GET"):  # byte by byte is no excuse
                dripping.start()
            answer = read_all(link)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 408 "), answer
        assert (answer != b"") == (len(begun) > 0)
        if answer:
            assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["reason"]
    finally:
        broker.run(server.__aexit__(None, None, None))


def drip(link: socket.socket) -> None:
    try:
        while True:
            link.sendall(b"x")
            threading.Event().wait(0.02)
    except OSError:
        return


# Rows "State" and "Concurrency".


def test_things_in_the_wrong_state(raw: Raw) -> None:
    ended = f"{ROOT}/persistent/public/default/ended"
    assert raw.ask("PUT", ended)[0] == 204
    for method, path, body, statuses in (
        ("PUT", ended, None, (409,)),
        ("PUT", f"{ended}/partitions", b"2", (409,)),
        ("POST", f"{ended}/partitions", b"2", (409,)),
        ("DELETE", f"{ended}/partitions", None, (409,)),
        ("POST", f"{ended}/terminate", None, (200,)),
        ("POST", f"{ended}/terminate", None, (200,)),
        ("PUT", f"{ended}/subscription/s", None, (204,)),
        ("PUT", f"{ended}/subscription/s", None, (409,)),
        ("DELETE", f"{ROOT}/namespaces/public/default", None, (409,)),
        ("DELETE", f"{ROOT}/tenants/public", None, (409,)),
        ("DELETE", f"{ROOT}/tenants/public?force=true", None, (405,)),
        ("DELETE", f"{ROOT}/clusters/standalone", None, (412,)),
        ("PUT", f"{ROOT}/namespaces/public/default", None, (409,)),
        ("PUT", f"{ROOT}/namespaces/nobody/default", None, (404,)),
        ("DELETE", ended, None, (204,)),
        ("DELETE", ended, None, (404,)),
    ):
        status, answer = raw.ask(method, path, body, JSON)
        assert status in statuses, (method, path, status, answer)


@pytest.mark.parametrize(
    ("method", "path", "body", "winner"),
    [
        ("PUT", "/tenants/once", b'{"allowedClusters": ["standalone"]}', 204),
        ("PUT", "/namespaces/public/once", b"{}", 204),
        ("PUT", "/clusters/once", b"{}", 200),
        ("PUT", "/persistent/public/default/once", None, 204),
        ("PUT", "/persistent/public/default/once-parts/partitions", b"3", 204),
        ("PUT", "/persistent/public/default/t/subscription/once", None, 204),
        ("PUT", "/scalable/public/default/once-scaled", b"{}", 204),
    ],
)
def test_of_fifty_equal_requests_one_wins(broker: BackgroundBroker, method: str, path: str, body: bytes, winner: int) -> None:
    with ThreadPoolExecutor(25) as pool:
        statuses = list(pool.map(lambda _number: once(broker, method, ROOT + path, body), range(50)))
    assert sorted(statuses) == sorted([winner] + [409] * 49)
    with ThreadPoolExecutor(25) as pool:
        gone = list(pool.map(lambda _number: once(broker, "DELETE", ROOT + path), range(20)))
    assert gone.count(204) >= 1 and set(gone) <= {204, 404, 409, 412}, gone


def test_policies_set_at_the_same_time_all_hold(broker: BackgroundBroker, raw: Raw) -> None:
    with ThreadPoolExecutor(20) as pool:
        path = f"{ROOT}/namespaces/public/default/property"
        statuses = list(pool.map(lambda number: once(broker, "PUT", f"{path}/k{number}/v"), range(40)))
    assert statuses == [204] * 40
    assert len(raw.json(f"{ROOT}/namespaces/public/default/properties")) == 40
    assert raw.ask("DELETE", f"{ROOT}/namespaces/public/default/properties")[0] == 204


# Rows "Limits" and "Output".


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", "/persistent/public/default/many/partitions", b"100000000", 406),
        ("PUT", "/persistent/public/default/many/partitions", b"-5", 406),
        ("PUT", "/persistent/public/default/many/partitions", b"99999999999999999999", 406),
        ("PUT", "/persistent/public/default/many", json.dumps({f"k{i}": "v" for i in range(2000)}).encode(), 412),
        ("PUT", "/persistent/public/default/many", json.dumps({"k": "v" * 20_000}).encode(), 400),
        ("PUT", "/scalable/public/default/many?numInitialSegments=1000000000", b"{}", 412),
        ("PUT", "/scalable/public/default/many?numInitialSegments=65537", b"{}", 412),
        ("PUT", "/scalable/public/default/many?numInitialSegments=0", b"{}", 412),
        ("PUT", "/scalable/public/default/many?numInitialSegments=-1", b"{}", 412),
        ("PUT", "/scalable/public/default/many", json.dumps({f"k{i}": "v" for i in range(2000)}).encode(), 412),
        ("PUT", "/segments/public/default/scaled/0000-7fff-0", json.dumps(["s" * 300]).encode(), 412),
        ("PUT", "/namespaces/public/many", json.dumps({"bundles": {"numBundles": 10**9}}).encode(), 412),
        ("PUT", "/namespaces/public/many", json.dumps({"x": "y" * 900_000}).encode(), 413),
        ("PUT", "/tenants/many", json.dumps({"allowedClusters": ["standalone"] * 2000}).encode(), 400),
        ("POST", "/namespaces/public/default/permissions/r", json.dumps(["produce"] * 1000).encode(), 400),
        (
            "POST",
            "/namespaces/public/default/autoTopicCreation",
            b'{"topicType": "partitioned", "defaultNumPartitions": 1000000}',
            412,
        ),
        ("PUT", "/persistent/public/default/t/subscription/new", b'{"batchIndex": 5000000, "ledgerId": 0, "entryId": 0}', 400),
    ],
)
def test_bounds(raw: Raw, method: str, path: str, body: bytes, status: int) -> None:
    before = persisted(raw)
    got, answer = raw.ask(method, ROOT + path, body, JSON)
    assert got == status, answer
    refused(got, answer)
    assert persisted(raw) == before


def test_answers_tell_nothing_of_the_inside(raw: Raw) -> None:
    for path in ("/brokers/configuration/runtime", "/brokers/internal-configuration", "/brokers/configuration/values"):
        text = raw.ask("GET", ROOT + path)[1].decode().lower()
        assert not [word for word in ("password", "secret", "token", "privatekey", "/tmp", "/home") if word in text]
    with socket.create_connection((raw.host, raw.port), timeout=10) as link:
        link.sendall(b"GET /docs HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        head = read_all(link).split(b"\r\n\r\n")[0].lower()
    assert b"server:" not in head
    assert b"x-content-type-options: nosniff" in head
    assert b"content-security-policy: default-src 'none'" in head
