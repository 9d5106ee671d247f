"""The OpenAPI document and the page for people, made from the calls' own declarations.

Owns nothing but the form: what a call takes and answers is said where the call is (`calls.py`), and checked there. The page
needs no script and nothing from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Any

import msgspec

from braid import __version__
from braid.model.names import MAX_NEW_LENGTH
from braid.scalable.coordinator import MAX_CONSUMER_NAME
from braid.web.calls import JSON_TYPE, MAX_INT64, MAX_REPEATED, PLAIN_TYPE, Call, Query

Json = dict[str, Any]
_PART = re.compile(r"{(\w+)}")
_WORD: Json = {"type": "string", "minLength": 1, "maxLength": 1000, "pattern": r"^[-=:.\w]+$"}
_NUMBER: Json = {"type": "integer", "format": "int64", "minimum": 0, "maximum": MAX_INT64}
_NAME: Json = {"type": "string", "minLength": 1}
PARTS: dict[str, tuple[Json, str]] = {
    "domain": ({"type": "string", "enum": ["persistent", "non-persistent", "topic", "segment"]}, "Kind of topic"),
    "cluster": (_WORD, "Name of a cluster"),
    "tenant": (_WORD, "Name of a tenant: letters, digits and - = : . _"),
    "namespace": (_WORD, "Name of a namespace inside its tenant: letters, digits and - = : . _"),
    "topic": (_NAME | {"maxLength": 2000}, "Name of a topic inside its namespace, percent-encoded"),
    "subscription": (_NAME | {"maxLength": MAX_NEW_LENGTH}, "Name of a subscription, percent-encoded"),
    "consumer": (_NAME | {"maxLength": MAX_CONSUMER_NAME}, "Name of a registered consumer, percent-encoded"),
    "descriptor": (_NAME, "Hash range and id of a segment, such as 0000-7fff-3; persistent: the topic itself stores one"),
    "segment": (_NUMBER, "Id of a segment"),
    "other": (_NUMBER, "Id of another segment"),
    "bundle": ({"type": "string", "pattern": "^0x[0-9a-f]{8}_0x[0-9a-f]{8}$"}, "A bundle, such as 0x00000000_0x40000000"),
    "broker": (_NAME, "A broker: its host and HTTP port"),
    "role": (_NAME | {"maxLength": 1000}, "Name of a role"),
    "key": (_NAME | {"maxLength": 1000}, "Name of a property"),
    "value": (_NAME | {"maxLength": 10_000}, "Value of a property"),
    "name": (_NAME, "Name of a setting"),
    "policy": (_NAME, "Name of a policy of Pulsar's that this version does not apply, such as messageTTL"),
    "topic_policy": (_NAME, "Name of a policy, such as retention"),
    "timestamp": (_NUMBER, "Milliseconds since 1970"),
    "seconds": (_NUMBER | {"maximum": (1 << 31) - 1}, "Age in seconds"),
    "count": (_NUMBER | {"minimum": 1, "maximum": (1 << 31) - 1}, "How many messages"),
    "position": (_NUMBER | {"minimum": 1, "maximum": (1 << 31) - 1}, "Which message, the first is 1"),
    "ledger": (_NUMBER, "Id of a ledger"),
    "entry": (_NUMBER, "Number of an entry in its ledger"),
    "sink": (_NAME | {"maxLength": 4096}, "Name of a sink, percent-encoded"),
    "most": (_NUMBER | {"minimum": -MAX_INT64 - 1}, "Most significant bits of a transaction id: its coordinator"),
    "least": (_NUMBER | {"minimum": -MAX_INT64 - 1}, "Least significant bits of a transaction id"),
}
REFUSALS = {
    307: "Another broker has it: the same call is to be sent to `Location`",
    400: "The body or a parameter cannot be understood",
    404: "It does not exist",
    405: "Not possible for this kind of object, or not in this version",
    406: "The number is out of bounds",
    409: "It exists already, changed at the same time or is still in use",
    412: "A name or value that cannot be used, or an object in use",
    413: "The body is too large",
    415: "The body is not JSON",
    422: "The topic cannot shrink",
    429: "Too much at the moment; try again",
    503: "Not available at the moment; try again",
}


def document(calls: Iterable[Call]) -> Json:
    """The OpenAPI 3.1 document of these calls."""
    calls = list(calls)
    kinds = [kind for call in calls for kind in (call.body, call.answer) if kind not in (None, bytes)]
    kinds = list({repr(kind): kind for kind in kinds}.values())
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    known = {repr(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    components["Refusal"] = {
        "type": "object",
        "properties": {"reason": {"type": "string", "description": "What is wrong and what to do"}},
        "required": ["reason"],
    }
    paths: Json = {}
    for call in calls:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call, known)
    tags = [{"name": tag} for tag in dict.fromkeys(call.tag for call in calls)]
    info = {
        "title": "Braid admin API",
        "version": __version__,
        "description": "Paths, statuses and shapes are those of Apache Pulsar's admin API. Names in paths are percent-encoded.",
    }
    return {"openapi": "3.1.0", "info": info, "tags": tags, "paths": paths, "components": {"schemas": components}}


def _operation(call: Call, known: Json) -> Json:
    text = call.text
    found: Json = {
        "operationId": _operation_id(call),
        "summary": text.partition("\n")[0],
        "description": " ".join(text.split()),
        "tags": [call.tag],
        "parameters": [_part(name) for name in _PART.findall(call.path)] + [_query(each) for each in call.query],
        "responses": _responses(call, known),
    }
    if not found["parameters"]:
        del found["parameters"]
    if call.body is not None:
        found["requestBody"] = {
            "required": call.body_default is msgspec.UNSET,
            "content": {JSON_TYPE: {"schema": known[repr(call.body)]}},
        }
    return found


def _operation_id(call: Call) -> str:
    words = re.findall(r"\w+", call.path.removeprefix("/admin/v2"))
    return "_".join([call.method.lower(), *words])


def _part(name: str) -> Json:
    schema, what = PARTS[name]
    return {"name": name, "in": "path", "required": True, "description": what, "schema": schema}


def _query(query: Query) -> Json:
    if query.kind is bool:
        schema: Json = {"type": "boolean"}
    elif query.kind is int:
        schema = {"type": "integer", "minimum": query.least, "maximum": query.most}
    else:
        schema = {"type": "string"} | ({"enum": list(query.choices)} if query.choices else {"maxLength": 4096})
    if query.default is not None:
        schema["default"] = query.default
    if query.is_many:
        schema = {"type": "array", "items": schema, "maxItems": MAX_REPEATED}
    return {"name": query.name, "in": "query", "required": False, "description": query.what, "schema": schema}


def _responses(call: Call, known: Json) -> Json:
    found: Json = {}
    if call.answer is None:
        found[str(call.status)] = {"description": "Done"}
    elif call.answer is bytes:
        content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        found[str(call.status)] = {"description": "A message: its payload; everything else is in headers", "content": content}
    else:
        media = PLAIN_TYPE if call.is_text else JSON_TYPE
        found[str(call.status)] = {"description": "The answer", "content": {media: {"schema": known[repr(call.answer)]}}}
        if call.is_optional:
            found["204"] = {"description": "Nothing is set"}
    refusal = {JSON_TYPE: {"schema": {"$ref": "#/components/schemas/Refusal"}}}
    for status in sorted(_statuses(call)):
        found[str(status)] = {"description": REFUSALS[status], "content": refusal}
        if status == 307:
            found["307"]["headers"] = {"Location": {"description": "Where to ask", "schema": {"type": "string"}}}
    return found


def _statuses(call: Call) -> set[int]:
    """The refusals a call can give, by what it takes."""
    statuses = {503, *call.statuses}
    parts = set(_PART.findall(call.path))
    if parts:
        statuses |= {400, 404, 412}
    if call.query:
        statuses |= {400}
    if call.body is not None:
        statuses |= {400, 412, 413, 415}
    if call.method != "GET":
        statuses |= {409, 413}
    if "topic" in parts:
        statuses |= {405}
    if call.needs_owner:
        statuses |= {307, 429}
    return statuses


def page(calls: Iterable[Call]) -> str:
    """Every call of the API as a plain table."""
    rows = []
    for call in sorted(calls, key=lambda each: (each.path, each.method)):
        text = escape(" ".join(call.text.split()))
        query = escape(", ".join(each.name for each in call.query))
        rows.append(f"<tr><td>{call.method}</td><td><code>{escape(call.path)}</code></td><td>{query}</td><td>{text}</td></tr>")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Braid admin API</title>"
        f"<h1>Braid {escape(__version__)} admin API</h1><p>As <a href='/openapi.json'>OpenAPI document</a>.</p>"
        "<table><thead><tr><th>method</th><th>path</th><th>query</th><th>what it does</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></html>"
    )
