"""REST: permissions of roles on namespaces, topics and subscriptions.

They are stored with the namespace's policies, in Pulsar's shape. This version authenticates nobody and so enforces none of
them; they are there for the day it does, and for tools that set them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from braid.errors import InvalidArgument
from braid.model.names import NamespaceName
from braid.web.admin import Admin
from braid.web.calls import Ask, Calls

Json = dict[str, Any]
Action = Literal["produce", "consume", "functions", "sources", "sinks", "packages"]
Actions = Annotated[list[Action], msgspec.Meta(max_length=100)]
Roles = Annotated[list[Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]], msgspec.Meta(max_length=1000)]
Granted = dict[str, list[str]]
NAMESPACE = "/namespaces/{tenant}/{namespace}/permissions"
TOPIC = "/persistent/{tenant}/{namespace}/{topic}/permissions"


def permission_calls(admin: Admin) -> Calls:
    """Calls about permissions."""
    calls = Calls("permissions")
    _namespaces(admin, calls)
    _subscriptions(admin, calls)
    _topics(admin, calls)
    return calls


async def _stored(admin: Admin, name: NamespaceName) -> Json:
    return _auth((await admin.service.namespaces.policies(name)).values)


async def _change(admin: Admin, name: NamespaceName, alter: Callable[[Json], None]) -> None:
    def altered(values: Json) -> None:
        auth = _auth(values)
        alter(auth)
        values["auth_policies"] = auth

    await admin.service.namespaces.policies(name)
    await admin.service.namespaces.change_policies(name, altered)


def _namespaces(admin: Admin, calls: Calls) -> None:
    @calls.get(NAMESPACE, Granted)
    async def of_namespace(ask: Ask) -> Any:
        """What each role may do in a namespace."""
        return (await _stored(admin, ask.namespace))["namespace_auth"]

    @calls.post(f"{NAMESPACE}/{{role}}", body=Actions)
    async def grant(ask: Ask) -> None:
        """Let a role do these things in a namespace: stored, not enforced in this version."""
        role, actions = _role(ask), sorted(set(ask.body))
        await _change(admin, ask.namespace, lambda auth: auth["namespace_auth"].update({role: actions}))

    @calls.delete(f"{NAMESPACE}/{{role}}")
    async def revoke(ask: Ask) -> None:
        """Take a role's permissions in a namespace away."""
        role = _role(ask)
        await _change(admin, ask.namespace, lambda auth: auth["namespace_auth"].pop(role, None))


def _subscriptions(admin: Admin, calls: Calls) -> None:
    @calls.get(f"{NAMESPACE}/subscription", Granted)
    async def of_subscriptions(ask: Ask) -> Any:
        """Which roles may use each subscription of a namespace."""
        return (await _stored(admin, ask.namespace))["subscription_auth_roles"]

    @calls.post(f"{NAMESPACE}/subscription/{{subscription}}", body=Roles)
    async def grant_subscription(ask: Ask) -> None:
        """Let only these roles use a subscription: stored, not enforced in this version."""
        subscription, roles = ask.subscription, sorted({_checked(role) for role in ask.body})
        await _change(admin, ask.namespace, lambda auth: auth["subscription_auth_roles"].update({subscription: roles}))

    @calls.delete(f"{NAMESPACE}/{{subscription}}/{{role}}")
    async def revoke_subscription(ask: Ask) -> None:
        """Take a role's right to use a subscription away."""
        subscription, role = ask.subscription, _role(ask)

        def alter(auth: Json) -> None:
            roles = [each for each in auth["subscription_auth_roles"].pop(subscription, []) if each != role]
            if roles:
                auth["subscription_auth_roles"][subscription] = roles

        await _change(admin, ask.namespace, alter)


def _topics(admin: Admin, calls: Calls) -> None:
    @calls.get(TOPIC, Granted)
    async def of_topic(ask: Ask) -> Any:
        """What each role may do with a topic, by itself or through its namespace."""
        name = ask.topic
        await admin.check_exists(name)
        auth = await _stored(admin, name.namespace)
        found = {role: set(actions) for role, actions in auth["namespace_auth"].items()}
        for role, actions in auth["destination_auth"].get(str(name), {}).items():
            found.setdefault(role, set()).update(actions)
        return {role: sorted(actions) for role, actions in found.items()}

    @calls.post(f"{TOPIC}/{{role}}", body=Actions)
    async def grant_topic(ask: Ask) -> None:
        """Let a role do these things with a topic: stored, not enforced in this version."""
        name, role, actions = ask.topic, _role(ask), sorted(set(ask.body))
        await admin.check_exists(name)
        await _change(
            admin, name.namespace, lambda auth: auth["destination_auth"].setdefault(str(name), {}).update({role: actions})
        )

    @calls.delete(f"{TOPIC}/{{role}}")
    async def revoke_topic(ask: Ask) -> None:
        """Take a role's permissions on a topic away; 412 if it has none on the topic itself."""
        name, role = ask.topic, _role(ask)
        await admin.check_exists(name)

        def alter(auth: Json) -> None:
            granted = auth["destination_auth"].get(str(name), {})
            if role not in granted:
                raise InvalidArgument(f"The role {role} has no permissions on the topic {name} itself.")
            del granted[role]
            if not granted:
                del auth["destination_auth"][str(name)]

        await _change(admin, name.namespace, alter)


def _auth(values: Json) -> Json:
    """The permissions in a namespace's policies, with all three maps."""
    stored = values.get("auth_policies") or {}
    return {key: dict(stored.get(key) or {}) for key in ("namespace_auth", "destination_auth", "subscription_auth_roles")}


def _role(ask: Ask) -> str:
    return _checked(ask.text("role"))


def _checked(role: str) -> str:
    if not role.strip() or not role.isprintable() or len(role) > 1000:
        raise InvalidArgument(f"{role[:100]!r} cannot be the name of a role.")
    return role
