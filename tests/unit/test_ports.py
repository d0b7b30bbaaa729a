import random
import socket
from collections.abc import Iterator

import pytest

from infra.local import ports
from infra.local.ports import PortTakenError, choose_port, claim_port, is_free


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    port = choose_port(random.Random())
    with socket.create_server(("127.0.0.1", port)) as server:
        yield server


def test_a_chosen_port_can_be_bound_and_lies_below_the_ephemeral_range() -> None:
    port = choose_port(random.Random())
    assert ports.LOWEST <= port <= ports.HIGHEST
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)


def test_a_port_someone_listens_on_is_not_chosen(listener: socket.socket) -> None:
    busy = listener.getsockname()[1]

    draws: Iterator[int] = iter([busy, busy, busy - 1, busy - 2, busy - 3])

    class Scripted(random.Random):
        def randint(self, a: int, b: int) -> int:
            return next(draws)

    assert choose_port(Scripted()) in (busy - 1, busy - 2, busy - 3)


def test_taken_ports_are_avoided() -> None:
    seed = 7
    first = choose_port(random.Random(seed))
    assert choose_port(random.Random(seed), {first}) != first


def test_a_port_on_all_addresses_counts_as_taken() -> None:
    port = choose_port(random.Random())
    with socket.create_server(("0.0.0.0", port)):
        assert not is_free(port)


def test_a_connection_in_time_wait_does_not_count(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    served, _ = listener.accept()
    served.close()  # the side that closes first keeps the port in TIME_WAIT
    client.close()
    listener.close()
    assert is_free(port)


def test_a_wanted_port_that_is_taken_is_an_error_that_names_it(listener: socket.socket) -> None:
    busy = listener.getsockname()[1]
    with pytest.raises(PortTakenError, match=rf"sql_port: port {busy} is in use"):
        claim_port(busy, "sql_port", random.Random())


@pytest.mark.parametrize("wanted", [-1, 65_536])
def test_a_number_that_is_no_port_is_refused(wanted: int) -> None:
    with pytest.raises(ValueError, match=f"gateway_port: {wanted} is not a port"):
        claim_port(wanted, "gateway_port", random.Random())


def test_a_range_that_is_all_ephemeral_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_first_ephemeral_port", lambda: 1024)
    with pytest.raises(RuntimeError, match="ephemeral range begins at 1024"):
        choose_port(random.Random())
