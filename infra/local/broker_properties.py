"""The settings of the single local Kafka node, as the text of its server.properties."""

import base64
import random
from collections.abc import Iterable, Mapping
from pathlib import Path


def new_cluster_id(rng: random.Random) -> str:
    """16 random bytes in base64url. Never with a leading "-", which the format tool takes for an option."""
    while True:
        cluster_id = base64.urlsafe_b64encode(rng.randbytes(16)).decode().rstrip("=")
        if not cluster_id.startswith("-"):
            return cluster_id


# Who may all: the services, and the node itself.
SUPER_USER = "headrace"


def server_properties(
    log_dir: Path,
    port: int,
    controller_port: int,
    proxied: Mapping[int, int] | None = None,
    password: str | None = None,
    *,
    node: int = 1,
    brokers: int = 1,
) -> str:
    """A node on the loopback address only. The first is broker and controller, the rest are brokers.

    `proxied`: further ports that it listens on, and for each the port of the proxy in front of it, which it
    tells the clients that come that way. With a `password`, SUPER_USER's, everyone must log in
    (SCRAM-SHA-512), and may do what ACLs allow.

    Memory and threads are held down: 165 MB resident at the start instead of 280 MB, and no slower.
    """
    more = {f"PROXIED{n}": ports for n, ports in enumerate((proxied or {}).items())}
    controller = [f"CONTROLLER://127.0.0.1:{controller_port}"] if node == 1 else []
    replication, min_isr = min(3, brokers), 2 if brokers > 2 else 1
    listeners = [f"INTERNAL://127.0.0.1:{port}"] + [
        f"{name}://127.0.0.1:{own}" for name, (own, _) in more.items()
    ]
    advertised = [f"INTERNAL://127.0.0.1:{port}"] + [
        f"{name}://127.0.0.1:{proxy}" for name, (_, proxy) in more.items()
    ]
    protocol = "PLAINTEXT" if password is None else "SASL_PLAINTEXT"
    protocols = [f"{name}:{protocol}" for name in ("INTERNAL", "CONTROLLER", *more)]
    settings: dict[str, object] = {
        "process.roles": "broker,controller" if node == 1 else "broker",
        "node.id": node,
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listeners": ",".join([*listeners, *controller]),
        "advertised.listeners": ",".join(advertised),
        "inter.broker.listener.name": "INTERNAL",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": ",".join(protocols),
        "log.dirs": log_dir,
        # Topics are made with their partitions and retention, never by a typing error.
        "auto.create.topics.enable": "false",
        # One clock for age and retention: the broker's.
        "log.message.timestamp.type": "LogAppendTime",
        # A killed broker may rejoin after its session: 3–4 s instead of 11–12.
        "broker.session.timeout.ms": 2000,
        "broker.heartbeat.interval.ms": 500,
        "group.initial.rebalance.delay.ms": 0,
        "group.min.session.timeout.ms": 500,
        "default.replication.factor": replication,
        "offsets.topic.num.partitions": 4,
        "offsets.topic.replication.factor": replication,
        "transaction.state.log.num.partitions": 4,
        "transaction.state.log.replication.factor": replication,
        "transaction.state.log.min.isr": min_isr,
        "share.coordinator.state.topic.num.partitions": 1,
        "share.coordinator.state.topic.replication.factor": replication,
        "share.coordinator.state.topic.min.isr": min_isr,
        "num.network.threads": 1,
        "num.io.threads": 2,
        "background.threads": 2,
        "log.cleaner.threads": 1,
        "log.cleaner.dedupe.buffer.size": 8 << 20,
        "log.cleaner.io.buffer.size": 128 << 10,
    }
    if password is not None:
        settings |= _with_login(password, ["INTERNAL", *more])
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def _with_login(password: str, listeners: Iterable[str]) -> dict[str, object]:
    """`listeners`: those of clients."""
    login = f'required username="{SUPER_USER}" password="{password}"'
    modules = "org.apache.kafka.common.security"
    jaas = f"{modules}.scram.ScramLoginModule {login};"
    return {
        "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        **{f"listener.name.{name.lower()}.scram-sha-512.sasl.jaas.config": jaas for name in listeners},
        # A controller knows no SCRAM users before it leads.
        "sasl.mechanism.controller.protocol": "PLAIN",
        "listener.name.controller.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.controller.plain.sasl.jaas.config": (
            f'{modules}.plain.PlainLoginModule {login} user_{SUPER_USER}="{password}";'
        ),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:{SUPER_USER}",
    }
