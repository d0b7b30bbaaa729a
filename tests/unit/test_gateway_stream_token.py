"""Tokens that let their bearer read one stream for a while."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stream_token import NotATokenError, StreamTokens

TOKENS = StreamTokens("a secret")
STREAM = "s" * 64
TENANTS = st.from_regex(r"[a-z0-9-]{1,40}", fullmatch=True)


@given(TENANTS, st.integers(1, 2**40 - 1))
def test_a_token_holds_until_its_time(tenant: str, expires_at: int) -> None:
    token = TOKENS.issue(tenant, STREAM, expires_at)
    assert StreamTokens("a secret").tenant(token, STREAM, expires_at - 0.5) == tenant
    with pytest.raises(NotATokenError):
        TOKENS.tenant(token, STREAM, expires_at)


def test_a_token_is_for_one_stream() -> None:
    token = TOKENS.issue("acme", STREAM, 1_000)
    with pytest.raises(NotATokenError):
        TOKENS.tenant(token, "t" * 64, 0)
    for secret in ("another", ""):
        with pytest.raises(NotATokenError):
            StreamTokens(secret).tenant(token, STREAM, 0)


@given(st.data())
def test_a_token_that_was_changed_is_none(data: st.DataObject) -> None:
    token = TOKENS.issue("acme", STREAM, 1_000)
    at = data.draw(st.integers(0, len(token) - 1))
    changed = token[:at] + data.draw(st.sampled_from("ABxyz09-_=+/ é")) + token[at + 1 :]
    if changed != token:
        with pytest.raises(NotATokenError):
            TOKENS.tenant(changed, STREAM, 0)


@given(st.text(max_size=120))
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(NotATokenError):
        TOKENS.tenant(text, STREAM, 0)
