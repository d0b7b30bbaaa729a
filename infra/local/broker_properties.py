"""The settings of the single local Kafka node, as the text of its server.properties."""

import base64
import random
from pathlib import Path


def new_cluster_id(rng: random.Random) -> str:
    """16 random bytes in base64url. Never with a leading "-", which the format tool takes for an option."""
    while True:
        cluster_id = base64.urlsafe_b64encode(rng.randbytes(16)).decode().rstrip("=")
        if not cluster_id.startswith("-"):
            return cluster_id


def server_properties(log_dir: Path, port: int, controller_port: int) -> str:
    """One node that is broker and controller, on the loopback address only.

    Memory and threads are held down: 165 MB resident at the start instead of 280 MB, and no slower.
    """
    settings = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listeners": f"INTERNAL://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"INTERNAL://127.0.0.1:{port}",
        "inter.broker.listener.name": "INTERNAL",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
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
        "default.replication.factor": 1,
        "offsets.topic.num.partitions": 4,
        "offsets.topic.replication.factor": 1,
        "transaction.state.log.num.partitions": 4,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "share.coordinator.state.topic.num.partitions": 1,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        "num.network.threads": 1,
        "num.io.threads": 2,
        "background.threads": 2,
        "log.cleaner.threads": 1,
        "log.cleaner.dedupe.buffer.size": 8 << 20,
        "log.cleaner.io.buffer.size": 128 << 10,
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())
