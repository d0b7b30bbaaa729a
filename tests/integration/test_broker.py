import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from infra.local.broker import Broker, BrokerError
from infra.local.ports import PortTakenError
from infra.topics.create import create
from schemas.topics import TopicSpec

TOPIC = TopicSpec("kept", 2, {"message.timestamp.type": "LogAppendTime"})


async def write(bootstrap_servers: str, value: bytes) -> int:
    """Appends `value` to partition 1 and returns its offset."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap_servers, acks="all", enable_idempotence=True)
    async with asyncio.timeout(20), producer:
        metadata = await producer.send_and_wait(TOPIC.name, value, partition=1)
        offset: int = metadata.offset
        return offset


async def read(bootstrap_servers: str, count: int) -> list[bytes]:
    """The first `count` values of partition 1."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap_servers, auto_offset_reset="none")
    async with asyncio.timeout(20), consumer:
        partition = TopicPartition(TOPIC.name, 1)
        consumer.assign([partition])
        consumer.seek(partition, 0)
        return [(await consumer.getone()).value for _ in range(count)]


async def test_data_survive_stop_kill_and_another_port(own_broker: Broker) -> None:
    await create(own_broker.bootstrap_servers, [TOPIC], 1)
    assert await write(own_broker.bootstrap_servers, b"before") == 0
    await own_broker.stop()

    # 1. A new object on the same data, and on another port.
    port = int(own_broker.bootstrap_servers.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        again = Broker(own_broker.data_dir)
        await again.start()
    try:
        assert again.bootstrap_servers != own_broker.bootstrap_servers
        assert await write(again.bootstrap_servers, b"after a stop") == 1

        # 2. kill -9 and a start of the same object: the same port, so that clients find it.
        servers = again.bootstrap_servers
        again.kill()
        await again.start()
        assert again.bootstrap_servers == servers
        assert await write(servers, b"after a kill") == 2
        assert await read(servers, 3) == [b"before", b"after a stop", b"after a kill"]
        await again.stop()
    finally:
        again.kill()


async def test_a_half_made_data_folder_is_made_anew(tmp_path: Path) -> None:
    leftover = tmp_path / "kafka" / "log" / "bootstrap.checkpoint"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"interrupted")
    broker = Broker(tmp_path)
    try:
        await broker.start()
        await create(broker.bootstrap_servers, [TOPIC], 1)
        await broker.stop()
    finally:
        broker.kill()


async def test_a_port_that_was_asked_for_and_is_taken_is_an_error(own_broker: Broker, tmp_path: Path) -> None:
    port = int(own_broker.bootstrap_servers.rpartition(":")[2])
    with pytest.raises(PortTakenError, match=f"Kafka: port {port} is in use"):
        await Broker(tmp_path / "second", port=port).start()


async def test_a_second_broker_on_the_same_data_is_refused_and_the_first_goes_on(own_broker: Broker) -> None:
    with pytest.raises(BrokerError, match=rf"kafka is in use by a broker of process {os.getpid()}"):
        await Broker(own_broker.data_dir).start()
    await create(own_broker.bootstrap_servers, [TOPIC], 1)


def test_the_broker_takes_little_memory_and_listens_on_loopback_only(broker: Broker) -> None:
    status = Path(f"/proc/{broker.pid}/status").read_text()
    resident_kb = int(status.split("VmRSS:")[1].split()[0])
    assert resident_kb < 300_000
    listening = listening_addresses(broker.pid)
    assert listening
    assert {address for address, _ in listening} == {"127.0.0.1"}
    assert all(port < 32_768 for _, port in listening)


def test_the_jvm_dies_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, pathlib
from infra.local.broker import Broker, BrokerError
async def main():
    broker = Broker(pathlib.Path({str(tmp_path)!r}))
    await broker.start()
    print(broker.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    jvm = int(owner.stdout.readline())
    os.kill(jvm, 0)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{jvm}").exists():
        assert time.monotonic() < deadline, "the JVM outlived its supervisor"
        time.sleep(0.02)


def listening_addresses(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports on which the process accepts TCP connections, from /proc."""
    inodes = {
        target.removeprefix("socket:[").removesuffix("]")
        for descriptor in Path(f"/proc/{pid}/fd").iterdir()
        if (target := os.readlink(descriptor)).startswith("socket:[")
    }
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                words = bytes.fromhex(address)
                # Each 32-bit word is in the machine's byte order.
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.add((socket.inet_ntop(family, packed).removeprefix("::ffff:"), int(port, 16)))
    return found
