"""How a client reaches Kafka: where, and as whom.

Bootstrap servers are handed about as text; with a login they stay text, and whoever makes a client of them
finds it there. A password is in no repr and no log.
"""

import ssl
from dataclasses import dataclass, field
from typing import Any

MECHANISM = "SCRAM-SHA-512"


@dataclass(frozen=True, slots=True)
class KafkaLogin:
    """A user of the brokers, by SCRAM-SHA-512. `tls`: with the authorities that the system trusts."""

    user: str
    password: str = field(repr=False)
    tls: bool = False

    @property
    def protocol(self) -> str:
        return "SASL_SSL" if self.tls else "SASL_PLAINTEXT"


class KafkaServers(str):
    """host:port[,host:port]. Without a `login` the brokers ask for none."""

    login: KafkaLogin | None

    def __new__(cls, servers: str, login: KafkaLogin | None = None) -> "KafkaServers":
        found = super().__new__(cls, servers)
        found.login = login
        return found


def login_of(servers: str) -> KafkaLogin | None:
    return servers.login if isinstance(servers, KafkaServers) else None


def client_settings(servers: str) -> dict[str, Any]:
    """What any client of aiokafka is to be told."""
    settings: dict[str, Any] = {"bootstrap_servers": str(servers)}
    if (login := login_of(servers)) is not None:
        settings |= {
            "security_protocol": login.protocol,
            "sasl_mechanism": MECHANISM,
            "sasl_plain_username": login.user,
            "sasl_plain_password": login.password,
            "ssl_context": ssl.create_default_context() if login.tls else None,
        }
    return settings
