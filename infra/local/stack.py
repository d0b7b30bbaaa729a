"""The whole system on this machine: broker, topics and services, started and stopped in order."""

import asyncio
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from infra.local.broker import Broker
from infra.local.child import Child, ChildSpec
from infra.local.file_lock import FileLock, LockedError
from infra.local.health import http_ready
from infra.local.ports import claim_port
from infra.local.services import SERVICES, Instance, Service, StackConfig, environment
from infra.local.supervisor import Supervisor
from infra.local.verbs import ensure_verbs
from infra.topics.create import create_topics
from schemas.kafka_login import KafkaServers

BROKER = "broker"
_PREDECESSOR_ENDS_S = 2.0
_WATCH_S = 0.1


class StackError(RuntimeError):
    """The stack cannot be started; the message says what to do."""


class Stack:
    """A running stack. Children are called `broker`, and `<service>-<slot>` like `worker-0`.

    One stack at a time holds a data folder. Children inherit the lock on it, so it is free only when the last
    process of a stack is gone, also after kill -9 of whoever started it.
    """

    def __init__(
        self,
        config: StackConfig,
        *,
        report: Callable[[str], None] = lambda message: None,
        services: Mapping[str, Service] = SERVICES,
        rng: random.Random | None = None,
        prepare: Callable[[Path], None] = lambda data_dir: None,
    ) -> None:
        """`prepare` is called with the data folder once it is ours and before anything uses it."""
        self.config = config
        self.broker: Broker | None = None
        self.more_brokers: dict[str, Broker] = {}
        self._report = report
        self._prepare = prepare
        self._services = services
        self._rng = rng or random.Random()
        self._lock = FileLock(config.data_dir / "lock")
        self._supervisor = Supervisor()
        self._instances: dict[str, Instance] = {}
        self._worker_env: Mapping[str, str] = os.environ

    @property
    def bootstrap_servers(self) -> KafkaServers:
        """host:port of the broker, with the services' login where it asks for one.

        Raises RuntimeError before the start.
        """
        if self.broker is None:
            raise RuntimeError("the stack is not started")
        brokers = (self.broker, *self.more_brokers.values())
        servers = ",".join(broker.bootstrap_servers for broker in brokers)
        return KafkaServers(servers, self.broker.bootstrap_servers.login)

    @property
    def sql_url(self) -> str:
        return f"http://127.0.0.1:{self._instance('ledger-0').sql_port}"

    def url(self, name: str = "gateway-0") -> str:
        """Where a service answers HTTP. Raises KeyError for a name that is none."""
        return f"http://127.0.0.1:{self._instance(name).http_port}"

    def child(self, name: str) -> Child:
        """The process called `name`, for its pid, log file and state. Raises KeyError."""
        if name == BROKER and self.broker is not None and self.broker.child is not None:
            return self.broker.child
        if name in self.more_brokers and (child := self.more_brokers[name].child) is not None:
            return child
        return self._supervisor.child(name)

    async def start(self) -> None:
        """Returns when the broker and all services are ready.

        Raises StackError, ChildError, TopicError, VerbsError where workers hand KV over and lack what the
        transfer engine needs, and what `Broker.start` raises; nothing runs then.
        """
        await self._lock_data_dir()
        try:
            self._prepare(self.config.data_dir)
            # 1. Ports, so that one that is taken is known before anything runs.
            self._instances = {instance.name: instance for instance in self._claim_ports()}
            if self.config.hands_over:
                self._worker_env = await asyncio.to_thread(ensure_verbs, os.environ, self._report)
            # 2. The broker, with the data of the last run.
            self._report("starting Kafka")
            self.broker = Broker(
                self.config.data_dir,
                port=self.config.kafka_port,
                report=self._report,
                rng=self._rng,
                avoid_ports={port for i in self._instances.values() for port in (i.http_port, i.sql_port)},
                pass_fds=self._lock.descriptors,
                proxied=self.config.kafka_proxies,
                auth=self.config.broker_auth,
                brokers=self.config.brokers,
            )
            await self.broker.start(self.config.start_timeout)
            await self._start_more_brokers(self.broker)
            # 3. Topics, before anyone reads or writes them.
            created = await create_topics(self.bootstrap_servers, self.config.layout)
            if created:
                self._report(f"created {len(created)} topics")
            # 4. Services, all at the same time: they meet on the log and need no neighbour to start.
            waves = self._waves()
            self._report("starting " + ", ".join(child.name for wave in waves for child in wave))
            await self._supervisor.start(*waves)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        # 4. Services, all at the same time: they meet on the log, so none waits for another.
        try:
            await self._supervisor.stop()
            await asyncio.gather(*(broker.stop() for broker in self.more_brokers.values()))
            if self.broker is not None:
                await self.broker.stop()
        finally:
            if self.broker is not None:
                for broker in self.more_brokers.values():
                    broker.kill()
                self.more_brokers.clear()
                self.broker.kill()
            self._instances.clear()
            self._lock.release()

    async def restart(self, name: str) -> None:
        """Starts a process again, with the same slot and ports, after stopping it if it runs."""
        if name == BROKER and self.broker is not None:
            await self.broker.stop()
            await self.broker.start(self.config.start_timeout)
        elif name in self.more_brokers:
            await self.more_brokers[name].stop()
            await self.more_brokers[name].start(self.config.start_timeout)
        else:
            await self._supervisor.restart(name)

    def kill(self, name: str) -> None:
        """kill -9 of a process and all it started. Raises KeyError."""
        self.child(name).kill()

    def check_alive(self) -> None:
        """Raises ChildDiedError for a process that ended without being asked to."""
        if self.broker is not None and self.broker.child is not None:
            self.broker.child.check_alive()
        self._supervisor.check_alive()

    async def watch(self) -> NoReturn:
        """Never returns; raises ChildDiedError within 0.1 s of a process's unexpected end."""
        while True:
            self.check_alive()
            await asyncio.sleep(_WATCH_S)

    async def __aenter__(self) -> "Stack":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start_more_brokers(self, first: Broker) -> None:
        taken = {port for i in self._instances.values() for port in (i.http_port, i.sql_port)}
        for node in range(2, self.config.brokers + 1):
            broker = Broker(
                self.config.data_dir,
                rng=self._rng,
                avoid_ports={*taken, first.controller_port},
                pass_fds=self._lock.descriptors,
                brokers=self.config.brokers,
                node=node,
                first=first,
            )
            await broker.start(self.config.start_timeout)
            self.more_brokers[broker.name] = broker

    def _instance(self, name: str) -> Instance:
        if name not in self._instances:
            names = ", ".join(self._instances)
            raise KeyError(f"no service process is called {name!r}: there are {names or 'none'}")
        return self._instances[name]

    async def _lock_data_dir(self) -> None:
        # A predecessor that was killed may still be going down.
        try:
            await asyncio.to_thread(self._lock.acquire, _PREDECESSOR_ENDS_S, f"process {os.getpid()}")
        except LockedError as error:
            raise StackError(
                f"{self.config.data_dir} is in use by {error.holder or 'another stack'}: "
                "stop that one, or choose another data folder"
            ) from None

    def _claim_ports(self) -> list[Instance]:
        """All processes of all services. Raises PortTakenError for an asked-for port that is in use."""
        taken = {*self.config.kafka_proxies, *self.config.kafka_proxies.values()}

        def claim(wanted: int, purpose: str) -> int:
            port = claim_port(wanted, purpose, self._rng, taken)
            taken.add(port)
            return port

        if self.config.kafka_port:
            claim(self.config.kafka_port, "kafka_port")
        instances = []
        ledger_sql_port = 0
        # The ports that were asked for first, so that none of them is drawn for another.
        for name in sorted(self._services, key=lambda name: name not in ("gateway", "ledger")):
            for slot in range(self._services[name].count(self.config)):
                first_gateway = name == "gateway" and slot == 0
                if name == "ledger" and slot == 0:
                    # One port: only the ledger that has the tables listens.
                    ledger_sql_port = claim(self.config.sql_port, "sql_port")
                sql_port = ledger_sql_port if name == "ledger" else 0
                http_port = claim(self.config.gateway_port if first_gateway else 0, "gateway_port")
                instances.append(Instance(name, slot, http_port, sql_port))
        return instances

    def _waves(self) -> list[list[Child]]:
        """The children of all services, in the order of their waves."""
        waves: dict[int, list[Child]] = {}
        for instance in self._instances.values():
            service = self._services[instance.service]
            waves.setdefault(service.wave, []).append(self._child(instance, service))
        return [waves[wave] for wave in sorted(waves)]

    def _child(self, instance: Instance, service: Service) -> Child:
        inherited = self._worker_env if instance.service == "worker" else os.environ
        return Child(
            ChildSpec(
                name=instance.name,
                argv=service.argv,
                env=environment(service, self.config, instance, self.bootstrap_servers, inherited),
                log_file=self.config.data_dir / "logs" / f"{instance.name}.log",
                ready=http_ready(instance.http_port, service.ready_path(self.config)),
                start_timeout=self.config.start_timeout,
                stop_timeout=service.stop_timeout,
                pass_fds=self._lock.descriptors,
            )
        )
