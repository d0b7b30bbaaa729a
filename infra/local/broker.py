"""A single Kafka node for this machine: KRaft, loopback only, data that outlive it."""

import asyncio
import os
import random
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from infra.local.broker_properties import SUPER_USER, new_cluster_id, server_properties
from infra.local.child import Child, ChildDiedError, ChildError, ChildSpec
from infra.local.file_lock import FileLock, LockedError
from infra.local.java import ensure_java
from infra.local.jvm import ClassArchive, KafkaCommand
from infra.local.kafka_jars import ensure_kafka_jars
from infra.local.paths import cache_dir
from infra.local.ports import claim_port
from schemas.kafka_login import MECHANISM, KafkaLogin, KafkaServers, client_settings

_START_ATTEMPTS = 3
_FORMAT_S = 60.0
_ARCHIVE_S = 120.0
_PROBE_S = 5.0
_PREDECESSOR_ENDS_S = 2.0


def password_file(data_dir: Path) -> Path:
    return data_dir / "kafka" / "password"


def _write_private(path: Path, text: str) -> None:
    """Whole or not at all, and for this user only."""
    unfinished = path.with_name(f"{path.name}.partial")
    unfinished.unlink(missing_ok=True)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    unfinished.rename(path)


class BrokerError(RuntimeError):
    """The broker's data could not be prepared; the message says why or where to look."""


class Broker:
    """Keeps its data under `data_dir`/kafka and its log in `data_dir`/logs/broker.log.

    `port` 0 has a free one chosen at each first start; a restart of the same object keeps it where it can, so
    clients find the broker again. Data survive restarts on any port.

    With `auth` clients must log in, and `bootstrap_servers` has the login of the services. Its password is
    made with the data, and lies in `password_file`.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
        env: Mapping[str, str] | None = None,
        report: Callable[[str], None] = lambda message: None,
        rng: random.Random | None = None,
        avoid_ports: Collection[int] = (),
        pass_fds: tuple[int, ...] = (),
        proxied: Mapping[int, int] | None = None,
        auth: bool = False,
        brokers: int = 1,
        node: int = 1,
        first: "Broker | None" = None,
    ) -> None:
        """`proxied`: see `server_properties`. Of several `brokers` the `first` is started first and last
        stopped: it is the controller of the others."""
        self.data_dir = data_dir.resolve()
        self.name = "broker" if node == 1 else f"broker-{node}"
        self.log_file = self.data_dir / "logs" / f"{self.name}.log"
        self.cluster_id = ""
        self.controller_port = 0
        self._brokers, self._node, self._first = brokers, node, first
        self.child: Child | None = None
        self._wanted_port = port
        self._port = 0
        self._env = dict(os.environ if env is None else env)
        self._report = report
        self._rng = rng or random.Random()
        self._proxied = dict(proxied or {})
        self._avoid_ports = frozenset((*avoid_ports, *self._proxied, *self._proxied.values()))
        self._pass_fds = pass_fds
        self._kafka_dir = self.data_dir / ("kafka" if node == 1 else f"kafka-{node}")
        self._properties = self._kafka_dir / "server.properties"
        self._formatted = self._kafka_dir / "cluster_id"
        self._lock = FileLock(self._kafka_dir / "lock")
        self._auth = auth
        self.password_file = password_file(self.data_dir)

    @property
    def bootstrap_servers(self) -> KafkaServers:
        """Raises RuntimeError before the first start."""
        if not self._port:
            raise RuntimeError("the broker has no port before it is started")
        password = self._password()
        login = None if password is None else KafkaLogin(SUPER_USER, password)
        return KafkaServers(f"127.0.0.1:{self._port}", login)

    def _password(self) -> str | None:
        return self.password_file.read_text() if self._auth else None

    @property
    def pid(self) -> int:
        if self.child is None:
            raise RuntimeError("the broker does not run")
        return self.child.pid

    async def start(self, timeout: float = 60.0) -> None:
        """Fetches what is missing; returns when the broker takes requests. `timeout` (s) is for its start.

        Raises JavaError, KafkaJarsError, PortTakenError, BrokerError, ChildError.
        """
        cache = cache_dir(self._env)
        java = await asyncio.to_thread(ensure_java, self._env, self._report)
        jars = await asyncio.to_thread(ensure_kafka_jars, cache, self._env, self._report)
        command = KafkaCommand(java, jars)
        archive = ClassArchive.of(cache, command)
        if not archive.exists:
            await self._ensure_archive(command, archive)
        command = command.with_flags(archive.flags())
        await self._lock_data()
        try:
            await self._run(command, command, timeout)
        except BaseException:
            self._lock.release()
            raise

    async def stop(self) -> None:
        """Ends it in order: what it has is on disk afterwards. Fine when it does not run."""
        if self.child is not None:
            await self.child.stop()
        self._lock.release()

    def kill(self) -> None:
        """kill -9."""
        if self.child is not None:
            self.child.kill()
        self._lock.release()

    async def _lock_data(self) -> None:
        """Keeps a second broker away: Kafka's own lock comes after its controller has written to the log.

        The JVM inherits the lock, so it is held as long as that lives.
        """
        self._lock.release()
        try:
            await asyncio.to_thread(self._lock.acquire, _PREDECESSOR_ENDS_S, f"process {os.getpid()}")
        except LockedError as error:
            raise BrokerError(f"{self._kafka_dir} is in use by a broker of {error.holder}") from None

    async def _run(
        self, format_tool: KafkaCommand, server: KafkaCommand, timeout: float, stop_timeout: float = 20.0
    ) -> None:
        for attempt in range(1, _START_ATTEMPTS + 1):
            self._choose_port(again=attempt > 1)
            self._choose_controller_port(again=attempt > 1)
            self._kafka_dir.mkdir(parents=True, exist_ok=True)
            self._ensure_password()
            _write_private(
                self._properties,
                server_properties(
                    self._kafka_dir / "log",
                    self._port,
                    self.controller_port,
                    self._proxied,
                    self._password(),
                    node=self._node,
                    brokers=self._brokers,
                ),
            )
            self.cluster_id = cluster_id = await self._format(format_tool)
            self.child = Child(
                ChildSpec(
                    name=self.name,
                    argv=server.argv("kafka.Kafka", str(self._properties)),
                    env=self._env,
                    log_file=self.log_file,
                    ready=partial(self._answers, cluster_id),
                    start_timeout=timeout,
                    stop_timeout=stop_timeout,
                    pass_fds=(*self._pass_fds, *self._lock.descriptors),
                )
            )
            try:
                await self.child.start()
            except ChildDiedError as error:
                # Someone took a port between our look and the broker's bind.
                if "Address already in use" not in error.last_lines or attempt == _START_ATTEMPTS:
                    raise
            else:
                return

    def _choose_port(self, again: bool) -> None:
        if self._wanted_port:
            self._port = claim_port(self._wanted_port, "Kafka", self._rng)
            return
        if self._port and not again:
            with suppress(RuntimeError):
                self._port = claim_port(self._port, "Kafka", self._rng)
                return
        self._port = claim_port(0, "Kafka", self._rng, self._avoid_ports)

    def _ensure_password(self) -> None:
        if not self._auth or self.password_file.exists():
            return
        if self._formatted.exists():
            raise BrokerError(
                f"the data in {self._kafka_dir} were made without broker authentication: "
                "begin anew (--fresh), or start without it"
            )
        _write_private(self.password_file, secrets.token_urlsafe(24))

    def _choose_controller_port(self, again: bool) -> None:
        """Others that run know the one that there was."""
        if self._first is not None:
            self.controller_port = self._first.controller_port
        elif again or self._brokers == 1 or not self.controller_port:
            avoid = {self._port, *self._avoid_ports}
            self.controller_port = claim_port(0, "Kafka controller", self._rng, avoid)

    async def _format(self, tool: KafkaCommand) -> str:
        """The cluster id of the data, made with them if need be.

        The id is written last, so a log folder without it is a format that was interrupted: made anew.
        """
        if self._formatted.exists():
            return self._formatted.read_text().strip()
        log_dir = self._kafka_dir / "log"
        shutil.rmtree(log_dir, ignore_errors=True)
        cluster_id = new_cluster_id(self._rng) if self._first is None else self._first.cluster_id
        argv = tool.argv("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(self._properties))
        if (password := self._password()) is not None:
            argv += ["--add-scram", f"{MECHANISM}=[name={SUPER_USER},password={password}]"]
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *argv, env=self._env, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                status = await asyncio.wait_for(process.wait(), _FORMAT_S)
            except BaseException:
                process.kill()
                await process.wait()
                raise
        if status:
            raise BrokerError(f"formatting {log_dir} failed with exit {status}: see {self.log_file}")
        unfinished = self._formatted.with_suffix(".partial")
        unfinished.write_text(cluster_id)
        unfinished.rename(self._formatted)
        return cluster_id

    async def _answers(self, cluster_id: str) -> bool:
        """True when this very cluster answers on the port and its broker takes requests."""
        host, port = self.bootstrap_servers.split(":")
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return False
        writer.close()
        admin = AIOKafkaAdminClient(
            **client_settings(self.bootstrap_servers), request_timeout_ms=int(_PROBE_S * 1000)
        )
        try:
            async with asyncio.timeout(_PROBE_S):
                await admin.start()
                cluster = await admin.describe_cluster()
        except (KafkaError, OSError, TimeoutError):
            return False
        finally:
            await admin.close()
        nodes = {broker["node_id"] for broker in cluster["brokers"]}
        return cluster["cluster_id"] == cluster_id and self._node in nodes

    async def _ensure_archive(self, command: KafkaCommand, archive: ClassArchive) -> None:
        """Writes the archive where it is missing. Without it the broker works, only slower."""
        lock = FileLock(archive.path.with_suffix(".lock"))
        try:
            await asyncio.to_thread(lock.acquire, _ARCHIVE_S)
            if not archive.exists:
                self._report("preparing fast starts of Kafka (once)")
                await self._write_archive(command, archive)
        except (LockedError, ChildError, BrokerError) as error:
            self._report(f"Kafka will start slower, without a class archive: {error}")
        finally:
            lock.release()

    async def _write_archive(self, command: KafkaCommand, archive: ClassArchive) -> None:
        """One run on throw-away data; the JVM writes the archive as it ends."""
        unfinished = archive.path.with_name(f"partial-{archive.path.name}")
        training = command.with_flags(archive.training_flags(unfinished))
        with tempfile.TemporaryDirectory(prefix="headrace-") as temporary:
            trial = Broker(Path(temporary), env=self._env, rng=self._rng, avoid_ports=self._avoid_ports)
            try:
                await trial._run(command, training, timeout=60.0, stop_timeout=_ARCHIVE_S)
                await trial.stop()
            finally:
                trial.kill()
            if not unfinished.exists():
                raise BrokerError(f"the JVM wrote none:\n{trial.child.last_lines() if trial.child else ''}")
        unfinished.rename(archive.path)
