"""Kafka's broker jars: fetched once from Maven Central, held to our own SHA-256 list, shared by all clones.

The list is the lock: each line names a jar by its place in a Maven repository, so nothing is resolved here
and no dependency can creep in. `python -m infra.local.kafka_jars` writes it anew after a version change.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from infra.local.file_lock import FileLock

if TYPE_CHECKING:
    from jgo.maven import MavenContext

KAFKA = "org.apache.kafka:kafka_2.13:4.4.0"
# Taken one by one, without what they depend on: a second resolved root would change Kafka's own versions.
BESIDE_KAFKA = (
    "org.apache.logging.log4j:log4j-slf4j-impl:2.25.5",  # without it the broker logs nothing
    "org.apache.kafka:kafka-tools:4.4.0",  # classes of the command line tools
)
CHECKSUMS = Path(__file__).with_name("kafka_jars.sha256")
_STAMP = "verified"
_REQUEST_TIMEOUT_S = 60
_OTHER_DOWNLOAD_S = 600.0  # another process that downloads the same
_DOWNLOADS_AT_ONCE = 4


class KafkaJarsError(RuntimeError):
    """Jars could not be fetched or are not the pinned ones; the message says what to do."""


@dataclass(frozen=True, slots=True)
class KafkaJars:
    """Verified jars. `digest` (hex) names the set; `paths` are in a fixed order, as JVM archives need it."""

    paths: tuple[Path, ...]
    digest: str

    @property
    def classpath(self) -> str:
        return ":".join(str(path) for path in self.paths)


def read_checksums(path: Path) -> dict[PurePosixPath, str]:
    """Repository path of each jar → SHA-256 in hex. Raises KafkaJarsError on a line of another form."""
    pinned: dict[PurePosixPath, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        fields = line.split()
        if len(fields) != 2 or len(fields[0]) != 64 or len(PurePosixPath(fields[1]).parts) < 4:
            raise KafkaJarsError(f"{path}, line {number}: expected a SHA-256 and a repository path")
        pinned[PurePosixPath(fields[1])] = fields[0]
    return pinned


def ensure_kafka_jars(
    cache: Path,
    env: Mapping[str, str],
    report: Callable[[str], None],
    fetch: "Callable[[MavenContext, PurePosixPath], Path] | None" = None,
    checksums: Path = CHECKSUMS,
) -> KafkaJars:
    """The verified jars under `cache`, downloaded where they are missing or damaged.

    Raises KafkaJarsError when a download fails or a jar has another checksum; what is there already is kept.
    A warm call reads file sizes and times only.
    """
    pinned = read_checksums(checksums)
    digest = hashlib.sha256(checksums.read_bytes()).hexdigest()[:16]
    folder = cache / "kafka" / digest
    jars = KafkaJars(tuple(folder / path.name for path in pinned), digest)
    if _is_verified(folder, jars.paths):
        return jars
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "kafka" / "lock").locked(timeout_s=_OTHER_DOWNLOAD_S):
        missing = [path for path, sha in pinned.items() if _sha256(folder / path.name) != sha]
        if missing:
            _download(missing, pinned, cache / "m2", folder, env, report, fetch or _fetch_from_central)
        (folder / _STAMP).write_text(_state(jars.paths))
    return jars


def _download(
    missing: list[PurePosixPath],
    pinned: Mapping[PurePosixPath, str],
    repository: Path,
    folder: Path,
    env: Mapping[str, str],
    report: Callable[[str], None],
    fetch: "Callable[[MavenContext, PurePosixPath], Path]",
) -> None:
    _pass_on_certificates(env)
    context = _maven_context(repository)

    def one(path: PurePosixPath) -> None:
        # 1. Fetch; the Maven folder may keep a broken file from an interrupted run, so once more without it.
        jar = fetch(context, path)
        if _sha256(jar) != pinned[path]:
            jar.unlink()
            jar = fetch(context, path)
        # 2. Refuse what is not the pinned file, and do not keep it.
        if (actual := _sha256(jar)) != pinned[path]:
            jar.unlink()
            raise KafkaJarsError(f"{path.name}: expected SHA-256 {pinned[path]}, got {actual}")
        # 3. Publish by rename: a reader sees the whole jar or none.
        partial = folder / f"{path.name}.partial"
        shutil.copyfile(jar, partial)
        partial.rename(folder / path.name)

    report(f"downloading Kafka: {len(missing)} jars, about 45 MB when all are missing")
    with ThreadPoolExecutor(_DOWNLOADS_AT_ONCE) as pool:
        downloads = {pool.submit(one, path): path for path in missing}
        for count, download in enumerate(as_completed(downloads), start=1):
            if error := download.exception():
                pool.shutdown(cancel_futures=True)
                if isinstance(error, KafkaJarsError):
                    raise error
                raise KafkaJarsError(
                    f"downloading {downloads[download].name} failed: {error}. "
                    "Check the network and run the command again; jars that are complete are kept."
                ) from error
            if count % 10 == 0 or count == len(missing):
                report(f"downloading Kafka: {count} of {len(missing)} jars")


def _maven_context(repository: Path) -> "MavenContext":
    # Imported where it is used: a warm start must not pay for it.
    from jgo.maven import MavenContext

    return MavenContext(repo_cache=repository, timeout=_REQUEST_TIMEOUT_S, offline=False)


def _fetch_from_central(context: "MavenContext", path: PurePosixPath) -> Path:
    group, (artifact, version) = ".".join(path.parts[:-3]), path.parts[-3:-1]
    return _resolve_one(context, f"{group}:{artifact}:{version}")


def _resolve_one(context: "MavenContext", coordinate: str) -> Path:
    from jgo.parse import Endpoint

    parsed = Endpoint.parse(coordinate).coordinates[0]
    jar: Path = context.create_dependency(replace(parsed, scope="compile")).artifact.resolve()
    return jar


def _pass_on_certificates(env: Mapping[str, str]) -> None:
    """Gives requests, which jgo downloads with, the certificate file that the environment gives to others."""
    if "REQUESTS_CA_BUNDLE" not in os.environ:
        for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "PIP_CERT"):
            if value := env.get(name):
                os.environ["REQUESTS_CA_BUNDLE"] = value
                return


def _state(paths: tuple[Path, ...]) -> str:
    stats = [(path.name, path.stat()) for path in paths]
    return "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)


def _is_verified(folder: Path, paths: tuple[Path, ...]) -> bool:
    try:
        return (folder / _STAMP).read_text() == _state(paths)
    except FileNotFoundError:
        return False


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def write_checksums() -> None:
    """Resolves Kafka's dependencies afresh and writes their checksums to the list."""
    _pass_on_certificates(os.environ)
    from jgo.parse import Endpoint

    with tempfile.TemporaryDirectory() as temporary:
        repository = Path(temporary)
        context = _maven_context(repository)
        roots = [
            context.create_dependency(replace(coordinate, scope=coordinate.scope or "compile"))
            for coordinate in Endpoint.parse(KAFKA).coordinates
        ]
        direct, transitive = context.resolver.resolve(roots)
        for dependency in [*direct, *transitive]:
            if dependency.scope in ("compile", "runtime"):
                dependency.artifact.resolve()
        for coordinate in BESIDE_KAFKA:
            _resolve_one(context, coordinate)
        jars = sorted(path.relative_to(repository).as_posix() for path in repository.rglob("*.jar"))
        CHECKSUMS.write_text("".join(f"{_sha256(repository / jar)}  {jar}\n" for jar in jars))
        sys.stdout.write(f"{len(jars)} jars in {CHECKSUMS}\n")


if __name__ == "__main__":
    write_checksums()
