import hashlib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from infra.local.kafka_jars import CHECKSUMS, KafkaJars, KafkaJarsError, ensure_kafka_jars, read_checksums

JARS = {
    PurePosixPath("org/example/one/1.0/one-1.0.jar"): b"first jar",
    PurePosixPath("org/example/two/2.0/two-2.0.jar"): b"second jar",
}


class Remote:
    """A Maven repository: what it has, and what was asked of it. Keeps files as a Maven cache does."""

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self.contents = dict(JARS)
        self.asked: list[PurePosixPath] = []

    def fetch(self, context: Any, path: PurePosixPath) -> Path:
        local = self.repository / path
        if not local.exists():
            self.asked.append(path)
            local.parent.mkdir(parents=True, exist_ok=True)
            local.write_bytes(self.contents[path])
        return local


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path / "remote-m2")


@pytest.fixture
def checksums(tmp_path: Path) -> Path:
    path = tmp_path / "jars.sha256"
    path.write_text("".join(f"{hashlib.sha256(data).hexdigest()}  {jar}\n" for jar, data in JARS.items()))
    return path


def ensure(tmp_path: Path, remote: Remote, checksums: Path) -> KafkaJars:
    return ensure_kafka_jars(tmp_path / "cache", {}, lambda message: None, remote.fetch, checksums)


def test_jars_are_fetched_once_and_in_a_fixed_order(tmp_path: Path, remote: Remote, checksums: Path) -> None:
    first = ensure(tmp_path, remote, checksums)
    second = ensure(tmp_path, remote, checksums)
    assert first == second
    assert [path.read_bytes() for path in first.paths] == list(JARS.values())
    assert sorted(remote.asked) == sorted(JARS)


def test_a_damaged_or_missing_jar_is_fetched_again(tmp_path: Path, remote: Remote, checksums: Path) -> None:
    jars = ensure(tmp_path, remote, checksums)
    jars.paths[0].write_bytes(b"first jaR")
    jars.paths[1].unlink()
    again = ensure(tmp_path, remote, checksums)
    assert [path.read_bytes() for path in again.paths] == list(JARS.values())


def test_a_broken_file_in_the_maven_cache_is_replaced(
    tmp_path: Path, remote: Remote, checksums: Path
) -> None:
    path = next(iter(JARS))
    (remote.repository / path).parent.mkdir(parents=True)
    (remote.repository / path).write_bytes(b"first")
    assert [jar.read_bytes() for jar in ensure(tmp_path, remote, checksums).paths] == list(JARS.values())


def test_a_jar_that_is_not_the_pinned_one_is_refused_and_not_kept(
    tmp_path: Path, remote: Remote, checksums: Path
) -> None:
    path = next(iter(JARS))
    remote.contents[path] = b"something else"
    with pytest.raises(KafkaJarsError, match=r"one-1\.0\.jar: expected SHA-256"):
        ensure(tmp_path, remote, checksums)
    assert not list((tmp_path / "cache").rglob("one-1.0.jar"))
    assert not (remote.repository / path).exists()
    remote.contents[path] = JARS[path]
    assert len(ensure(tmp_path, remote, checksums).paths) == len(JARS)


def test_a_failed_download_says_which_and_keeps_the_others(
    tmp_path: Path, remote: Remote, checksums: Path
) -> None:
    broken = list(JARS)[1]
    del remote.contents[broken]
    with pytest.raises(KafkaJarsError, match=r"downloading two-2\.0\.jar failed.*run the command again"):
        ensure(tmp_path, remote, checksums)
    remote.contents[broken] = JARS[broken]
    remote.asked.clear()
    ensure(tmp_path, remote, checksums)
    assert remote.asked == [broken]


@pytest.mark.parametrize("line", ["abc  org/example/one/1.0/one-1.0.jar", "0" * 64, "0" * 64 + "  one.jar"])
def test_a_malformed_list_names_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "jars.sha256"
    path.write_text("0" * 64 + "  org/example/one/1.0/one-1.0.jar\n" + line + "\n")
    with pytest.raises(KafkaJarsError, match="line 2"):
        read_checksums(path)


def test_the_pinned_list_holds_one_file_of_each_name_and_kafka_itself() -> None:
    names = [path.name for path in read_checksums(CHECKSUMS)]
    assert len(names) == len(set(names))
    assert {"kafka_2.13-4.4.0.jar", "kafka-clients-4.4.0.jar", "log4j-slf4j-impl-2.25.5.jar"} <= set(names)
