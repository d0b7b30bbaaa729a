"""What is written while a batch is held goes out at its end, in order; else at once."""

from types import SimpleNamespace

import pytest

from gateway.stream_writer import StreamWriter, WriteBatch


class Wire:
    """A connection, and the response that runs on it, as far as they are looked at."""

    def __init__(self, batch: WriteBatch, sent: list[tuple[str, bytes]], name: str) -> None:
        cycle = SimpleNamespace(transport=SimpleNamespace(write=lambda data: sent.append((name, data))))
        self.write = StreamWriter(cycle, batch).write


def test_writes_wait_for_the_end_of_the_batch() -> None:
    batch, sent = WriteBatch(), list[tuple[str, bytes]]()
    a, b = (Wire(batch, sent, name) for name in "ab")
    a.write(b"before")
    with batch:
        a.write(b"x")
        b.write(b"y" * 16)
        a.write(b"z")
        assert sent == [("a", b"6\r\nbefore\r\n")]
    a.write(b"after")
    held = [("a", b"1\r\nx\r\n"), ("b", b"10\r\n" + b"y" * 16 + b"\r\n"), ("a", b"1\r\nz\r\n")]
    assert sent == [("a", b"6\r\nbefore\r\n"), *held, ("a", b"5\r\nafter\r\n")]


def test_an_error_loses_nothing_that_was_written() -> None:
    batch, sent = WriteBatch(), list[tuple[str, bytes]]()
    wire = Wire(batch, sent, "a")

    def fail() -> None:
        with batch:
            wire.write(b"x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert sent == [("a", b"1\r\nx\r\n")]


def test_many_writes_do_not_wait_for_all() -> None:
    batch, sent = WriteBatch(), list[tuple[str, bytes]]()
    names = [str(number) for number in range(200)]
    wires = [Wire(batch, sent, name) for name in names]
    with batch:
        for wire in wires:
            wire.write(b"x")
        assert 100 < len(sent) < 200
    assert [name for name, _ in sent] == names
