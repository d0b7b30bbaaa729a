"""The public id of a stream."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.public_id import NotAnIdError, PublicId, PublicIds, hash_model

IDS = PublicIds("a secret")
TENANTS = st.from_regex(r"[a-z0-9-]{1,40}", fullmatch=True)
PUBLIC_IDS = st.builds(
    PublicId,
    reply_partition=st.integers(0, 0xFFFF),
    first_offset=st.integers(0, 2**63 - 1),
    request_id=st.binary(min_size=16, max_size=16),
    priority=st.integers(0, 2),
    model_hash=st.binary(min_size=4, max_size=4),
    may_be_cut=st.booleans(),
    described=st.booleans(),
    call_prefix=st.sampled_from(["", "call", "toolu"]),
)
ONE = PublicId(3, 12_345, bytes(range(16)), 1, hash_model("simulated"), may_be_cut=True)


@given(TENANTS, PUBLIC_IDS)
def test_an_id_comes_back_as_it_was(tenant: str, public_id: PublicId) -> None:
    text = IDS.encode(tenant, public_id)
    assert re.fullmatch(r"[A-Za-z0-9_-]{64}", text)
    assert IDS.decode(tenant, text) == public_id
    assert PublicIds("a secret").decode(tenant, text) == public_id


@given(TENANTS, TENANTS, PUBLIC_IDS)
def test_an_id_is_no_other_tenants(tenant: str, other: str, public_id: PublicId) -> None:
    text = IDS.encode(tenant, public_id)
    if other != tenant:
        with pytest.raises(NotAnIdError):
            IDS.decode(other, text)


@given(st.data())
def test_an_id_that_was_changed_is_none(data: st.DataObject) -> None:
    text = IDS.encode("acme", ONE)
    at = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.sampled_from("ABCwxyz019-_=+/ é"))
    changed = text[:at] + letter + text[at + 1 :]
    if changed != text:
        with pytest.raises(NotAnIdError):
            IDS.decode("acme", changed)


@given(st.text(max_size=200))
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(NotAnIdError):
        IDS.decode("acme", text)


@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: t + "A", lambda t: t * 2, lambda t: t + "="])
def test_an_id_has_one_spelling(change: object) -> None:
    assert callable(change)
    with pytest.raises(NotAnIdError):
        IDS.decode("acme", change(IDS.encode("acme", ONE)))


def test_the_other_alphabet_is_none() -> None:
    text = next(
        text
        for offset in range(1_000)
        if "-" in (text := IDS.encode("acme", ONE._replace(first_offset=offset))) and "_" in text
    )
    with pytest.raises(NotAnIdError):
        IDS.decode("acme", text.replace("-", "+").replace("_", "/"))


def test_another_secret_gives_other_ids() -> None:
    for secret in ("another", ""):
        with pytest.raises(NotAnIdError):
            PublicIds(secret).decode("acme", IDS.encode("acme", ONE))
    assert PublicIds("").encode("acme", ONE) != PublicIds("").encode("acme", ONE)
