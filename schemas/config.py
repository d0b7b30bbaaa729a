"""Reads a service's frozen config dataclass from environment variables, and reports all errors at once.

A field `slot` is the variable HEADRACE_SLOT. A field's metadata holds its `doc` (with the unit). A
HEADRACE_ name that no service knows fails, so a typing error is never a silent default.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from schemas.kafka_login import KafkaLogin, KafkaServers
from schemas.topics import Layout

PREFIX = "HEADRACE_"
T = TypeVar("T")
_MODELS_DIR = Path(".headrace/models")

# Set for the commands, not for a service; children inherit them.
_COMMAND_VARIABLES = frozenset({"HEADRACE_PYTHON", "HEADRACE_JAVA", "HEADRACE_CACHE", "HEADRACE_API_KEY"})


class ConfigError(ValueError):
    """All that is wrong with the environment, one line each."""

    def __init__(self, errors: Iterable[str]) -> None:
        self.errors = list(errors)
        super().__init__("configuration:\n  " + "\n  ".join(self.errors))


def setting(default: Any = dataclasses.MISSING, *, doc: str, secret: bool = False) -> Any:
    """A config field; without a default it must be set. A `secret` is in no repr."""
    return dataclasses.field(default=default, metadata={"doc": doc}, repr=not secret)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonConfig:
    """What every service is told."""

    kafka: str = setting(doc="Bootstrap servers, host:port[,host:port].")
    kafka_user: str = setting("", doc="As whom, by SCRAM-SHA-512; empty: the brokers ask for no login.")
    kafka_password: str = setting("", doc="That user's password; better in a file.", secret=True)
    kafka_password_file: Path | None = setting(None, doc="File that holds the password and nothing else.")
    kafka_tls: bool = setting(False, doc="TLS to the brokers, for a user. SSL_CERT_FILE names authorities.")
    slot: int = setting(0, doc="This process's slot number (ordinal) among its role.")
    http_host: str = setting("127.0.0.1", doc="Address to bind HTTP to.")
    http_port: int = setting(0, doc="Port of /health, /metrics and the service's own API; 0 picks one.")
    shards: int = setting(4, doc="Shards of hashed topics.")
    worker_slots: int = setting(4, doc="Worker slots the topics were made for.")
    gateway_slots: int = setting(4, doc="Gateway slots the topics were made for.")
    models_dir: Path = setting(_MODELS_DIR, doc="Folder of the model catalogue.")
    models: str = setting("", doc="Ids of the models served, with commas; empty: all of models_dir.")
    log_level: str = setting("INFO", doc="DEBUG, INFO, WARNING or ERROR.")

    def __post_init__(self) -> None:
        servers, _ = kafka_servers(
            self.kafka, self.kafka_user, self.kafka_password, self.kafka_password_file, tls=self.kafka_tls
        )
        object.__setattr__(self, "kafka", servers)

    def layout(self) -> Layout:
        return Layout(self.shards, self.worker_slots, self.gateway_slots)

    def model_ids(self) -> list[str]:
        return [name.strip() for name in self.models.split(",") if name.strip()]

    def errors(self) -> list[str]:
        """Errors in values, beside those of form; subclasses extend it."""
        found = [
            f"{PREFIX}{name.upper()} must be at least 1, not {getattr(self, name)}"
            for name in ("shards", "worker_slots", "gateway_slots")
            if getattr(self, name) < 1
        ]
        _, wrong = kafka_servers(
            self.kafka, self.kafka_user, self.kafka_password, self.kafka_password_file, tls=self.kafka_tls
        )
        found += wrong
        if self.slot < 0:
            found.append(f"{PREFIX}SLOT must not be negative, got {self.slot}")
        if not 0 <= self.http_port < 65536:
            found.append(f"{PREFIX}HTTP_PORT must be 0 to 65535, got {self.http_port}")
        if self.log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            found.append(f"{PREFIX}LOG_LEVEL must be DEBUG, INFO, WARNING or ERROR, got {self.log_level!r}")
        return found


def kafka_servers(
    servers: str, user: str, password: str, password_file: Path | None, *, tls: bool
) -> tuple[KafkaServers, list[str]]:
    """The servers with the login, and what is wrong with it; then they are without one."""
    if not user:
        unused = [
            f"{PREFIX}{name} is for a {PREFIX}KAFKA_USER, and none is named"
            for name, value in (
                ("KAFKA_PASSWORD", password),
                ("KAFKA_PASSWORD_FILE", password_file),
                ("KAFKA_TLS", tls),
            )
            if value
        ]
        return KafkaServers(servers), unused
    if bool(password) == (password_file is not None):
        both = f"{PREFIX}KAFKA_USER needs either {PREFIX}KAFKA_PASSWORD or {PREFIX}KAFKA_PASSWORD_FILE"
        return KafkaServers(servers), [both]
    if password_file is not None:
        try:
            password = password_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as e:
            return KafkaServers(servers), [
                f"{PREFIX}KAFKA_PASSWORD_FILE: {password_file} cannot be read: {e}"
            ]
        if not password:
            return KafkaServers(servers), [f"{PREFIX}KAFKA_PASSWORD_FILE: {password_file} is empty"]
    return KafkaServers(servers, KafkaLogin(user, password, tls)), []


def _parse(annotation: Any, text: str) -> Any:
    if isinstance(annotation, types.UnionType):  # `X | None`: an empty value means None
        if text == "":
            return None
        annotation = next(a for a in annotation.__args__ if a is not types.NoneType)
    if annotation is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off", ""):
            return False
        raise ValueError("expected true or false")
    if annotation in (int, float):
        return annotation(text)
    if annotation is Path:
        return Path(text)
    return text


def from_env(cls: type[T], environ: Mapping[str, str]) -> T:
    """`cls` filled from `environ`. Raises ConfigError with every error found."""
    hints = typing.get_type_hints(cls)
    fields = {PREFIX + f.name.upper(): f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    known = fields.keys() | _COMMAND_VARIABLES
    errors = [
        f"{name} is not a setting; {_closest(name, known)}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known
    ]
    values: dict[str, Any] = {}
    for variable, field in fields.items():
        if variable in environ:
            try:
                values[field.name] = _parse(hints[field.name], environ[variable])
            except ValueError:
                kind = getattr(hints[field.name], "__name__", str(hints[field.name])).removesuffix(" | None")
                errors.append(f"{variable}={environ[variable]!r} is not a valid {kind}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            errors.append(f"{variable} is not set: {field.metadata.get('doc', '')}")
    if errors:
        raise ConfigError(errors)
    config = cls(**values)
    found = config.errors() if isinstance(config, CommonConfig) else []
    if found:
        raise ConfigError(found)
    return config


def _closest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else "see the service's config.py"


def describe(cls: type[Any]) -> str:
    """One line per variable: name, default, meaning."""
    lines = []
    for field in dataclasses.fields(cls):
        default = "required" if field.default is dataclasses.MISSING else f"default {field.default}"
        lines.append(f"{PREFIX}{field.name.upper()} ({default}): {field.metadata.get('doc', '')}")
    return "\n".join(lines)
