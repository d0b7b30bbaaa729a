import base64
import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from infra.local.broker_properties import new_cluster_id, server_properties


@given(st.integers(min_value=0))
def test_a_cluster_id_is_16_bytes_and_never_looks_like_an_option(seed: int) -> None:
    cluster_id = new_cluster_id(random.Random(seed))
    assert not cluster_id.startswith("-")
    assert len(base64.urlsafe_b64decode(cluster_id + "==")) == 16


def test_with_a_password_nobody_is_a_super_user_without_it() -> None:
    text = server_properties(Path("/data/kafka/log"), 21001, 21002, {21003: 21004}, "s3cret")
    settings = dict(line.split("=", 1) for line in text.splitlines())
    protocols = settings["listener.security.protocol.map"].split(",")
    assert {protocol.partition(":")[2] for protocol in protocols} == {"SASL_PLAINTEXT"}
    assert len(protocols) == len(settings["listeners"].split(",")) == 3
    assert settings["super.users"] == "User:headrace"
    assert settings["authorizer.class.name"].endswith("StandardAuthorizer")
    assert "allow.everyone.if.no.acl.found" not in settings
    assert "s3cret" not in server_properties(Path("/data/kafka/log"), 21001, 21002)


def test_all_listeners_are_on_the_loopback_address() -> None:
    text = server_properties(Path("/data/kafka/log"), 21001, 21002)
    settings = dict(line.split("=", 1) for line in text.splitlines())
    for listener in settings["listeners"].split(",") + settings["advertised.listeners"].split(","):
        assert "://127.0.0.1:2100" in listener
    assert settings["controller.quorum.voters"] == "1@127.0.0.1:21002"
    assert settings["log.dirs"] == "/data/kafka/log"
    assert settings["auto.create.topics.enable"] == "false"
    assert settings["log.message.timestamp.type"] == "LogAppendTime"
