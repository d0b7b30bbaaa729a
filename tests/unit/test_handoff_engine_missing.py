"""A machine without the library that the transfer engine is linked to is told what to install."""

import sys

import pytest

from workers.handoff.mooncake_transport import MooncakeTransport, TransferEngineMissingError


def test_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransferEngineMissingError, match=r"libibverbs\.so\.1.*apt-get install libibverbs1"):
        MooncakeTransport("127.0.0.1")
