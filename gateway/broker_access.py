"""What a tenant's own Kafka clients may do: a SCRAM user of its own, and ACLs for its two topics.

Where the brokers ask for no login there is nothing to grant, and all may do all.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from gateway.topic_admin import TopicError
from schemas.kafka_login import MECHANISM, KafkaLogin, login_of
from schemas.topics import batch_requests, batch_results, check_tenant

_TIMEOUT_S = 20.0
_POLL_S = 0.02
_ITERATIONS = 8_192
# Of another user than the services': a tenant may be called as they are.
_USER_PREFIX = "tenant-"


def user_of(tenant: str) -> str:
    return _USER_PREFIX + check_tenant(tenant)


def owned_prefix(tenant: str) -> str:
    """How its consumer groups and transactional ids begin. No tenant's name has a dot, so none of them begins
    as another's does."""
    return check_tenant(tenant) + "."


def granted(tenant: str) -> list[AclBinding]:
    """Writes its requests, also in transactions; reads its results, in groups of its own."""
    rules: list[tuple[Any, str, Any, Any]] = [
        (ResourceType.TOPIC, batch_requests(tenant), ResourcePatternType.LITERAL, AclOperation.WRITE),
        (ResourceType.TOPIC, batch_results(tenant), ResourcePatternType.LITERAL, AclOperation.READ),
        (ResourceType.GROUP, owned_prefix(tenant), ResourcePatternType.PREFIXED, AclOperation.READ),
        (
            ResourceType.TRANSACTIONAL_ID,
            owned_prefix(tenant),
            ResourcePatternType.PREFIXED,
            AclOperation.WRITE,
        ),
    ]
    return [
        AclBinding(kind, name, pattern, f"User:{user_of(tenant)}", "*", operation, AclPermissionType.ALLOW)
        for kind, name, pattern, operation in rules
    ]


class BrokerAccess:
    """Every method raises TopicError for what the brokers refuse, TimeoutError when they do not answer."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._servers, self._login = str(bootstrap_servers), login_of(bootstrap_servers)

    @property
    def guarded(self) -> bool:
        """Whether the brokers ask for a login."""
        return self._login is not None

    async def grant(self, tenant: str) -> KafkaLogin:
        """A user that may use the tenant's topics and nothing else, with a new password."""
        admin = await self._admin()
        # 1. What it may do. A user that is not there does none of it.
        await _all(admin.create_acls(granted(tenant), request_timeout=_TIMEOUT_S).values())
        # 2. The user. The password is stored nowhere but salted, in the brokers.
        login = KafkaLogin(
            user_of(tenant), secrets.token_urlsafe(24), self._login is not None and self._login.tls
        )
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, _ITERATIONS)
        change = UserScramCredentialUpsertion(login.user, info, login.password.encode())
        await _all(admin.alter_user_scram_credentials([change], request_timeout=_TIMEOUT_S).values())
        # 3. The broker that we ask has heard of it from the controller, and so of what came before it.
        await _until(lambda: self._knows(admin, login.user))
        return login

    async def _knows(self, admin: AdminClient, user: str) -> bool:
        found: Any = admin.describe_user_scram_credentials([user], request_timeout=_TIMEOUT_S)
        try:
            await asyncio.wrap_future(found[user])
        except KafkaException as e:
            if e.args[0].code() != KafkaError.RESOURCE_NOT_FOUND:
                raise
            return False
        return True

    async def revoke(self, tenant: str) -> None:
        """The user with all it may do. Fine where there is none."""
        admin, user = await self._admin(), user_of(tenant)
        # 1. The user: new connections are refused. 2. Its rights: those that are open can do nothing.
        change = UserScramCredentialDeletion(user, ScramMechanism.SCRAM_SHA_512)
        await _all(
            admin.alter_user_scram_credentials([change], request_timeout=_TIMEOUT_S).values(),
            fine=(KafkaError.RESOURCE_NOT_FOUND,),
        )
        anything: Any = None
        mine = AclBindingFilter(
            ResourceType.ANY,
            anything,
            ResourcePatternType.ANY,
            f"User:{user}",
            anything,
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        await _all(admin.delete_acls([mine], request_timeout=_TIMEOUT_S).values())

        async def nothing_left() -> bool:
            return not await asyncio.wrap_future(admin.describe_acls(mine, request_timeout=_TIMEOUT_S))

        await _until(nothing_left)

    async def _admin(self) -> AdminClient:
        login = self._login
        if login is None:
            raise RuntimeError("the brokers ask for no login: there is nothing to grant")
        settings: dict[str, str | int | float | bool] = {
            "bootstrap.servers": self._servers,
            "security.protocol": login.protocol,
            "sasl.mechanism": MECHANISM,
            "sasl.username": login.user,
            "sasl.password": login.password,
            # What goes wrong comes back with the call.
            "log_level": 0,
        }
        return await asyncio.to_thread(AdminClient, settings)


async def _until(done: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        while not await done():  # noqa: ASYNC110  # nobody would set an event
            await asyncio.sleep(_POLL_S)


async def _all(futures: Iterable["Future[Any]"], fine: tuple[int, ...] = ()) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        for future in futures:
            try:
                await asyncio.wrap_future(future)
            except KafkaException as e:
                error = e.args[0]
                if error.code() not in fine:
                    raise TopicError(f"the brokers did not change who may do what: {error.str()}") from None
