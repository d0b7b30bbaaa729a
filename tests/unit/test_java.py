from pathlib import Path

import pytest

from infra.local.java import JavaError, find_java, probe


def fake_java(folder: Path, version: str) -> Path:
    """A program that answers `-version` the way a JVM does: on standard error."""
    executable = folder / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    executable.chmod(0o755)
    return executable


@pytest.mark.parametrize(
    ("version", "major"), [("17.0.15", 17), ("25.0.2", 25), ("25", 25), ("26-ea", 26), ("1.8.0_402", 8)]
)
def test_the_major_version_is_read(tmp_path: Path, version: str, major: int) -> None:
    assert probe(fake_java(tmp_path, version)).major == major


def test_the_order_is_headrace_java_then_java_home_then_path(tmp_path: Path) -> None:
    chosen, home, on_path = (fake_java(tmp_path / name, "21.0.1") for name in ("chosen", "home", "path"))
    env = {
        "HEADRACE_JAVA": str(chosen),
        "JAVA_HOME": str(home.parent.parent),
        "PATH": str(on_path.parent),
    }
    for name, expected in (("HEADRACE_JAVA", chosen), ("JAVA_HOME", home), ("PATH", on_path)):
        found = find_java(env)
        assert found is not None
        assert found.executable == expected
        del env[name]
    assert find_java(env) is None


def test_headrace_java_may_be_a_java_home(tmp_path: Path) -> None:
    executable = fake_java(tmp_path, "21.0.1")
    found = find_java({"HEADRACE_JAVA": str(tmp_path)})
    assert found is not None
    assert found.executable == executable


def test_an_old_or_broken_java_is_passed_over(tmp_path: Path) -> None:
    old, good = fake_java(tmp_path / "old", "11.0.2"), fake_java(tmp_path / "good", "17.0.1")
    env = {"JAVA_HOME": str(old.parent.parent), "PATH": str(good.parent)}
    found = find_java(env)
    assert found is not None
    assert found.executable == good
    good.write_text("#!/bin/sh\nexit 1\n")
    assert find_java(env) is None


def test_an_unfit_headrace_java_is_an_error_and_not_passed_over(tmp_path: Path) -> None:
    good = fake_java(tmp_path / "good", "17.0.1")
    old = fake_java(tmp_path / "old", "11.0.2")
    with pytest.raises(JavaError, match=r"HEADRACE_JAVA: .* is Java 11; 17 or newer is needed"):
        find_java({"HEADRACE_JAVA": str(old), "PATH": str(good.parent)})
    with pytest.raises(JavaError, match="does not run"):
        find_java({"HEADRACE_JAVA": str(tmp_path / "nowhere"), "PATH": str(good.parent)})


def test_a_program_that_names_no_version_is_refused(tmp_path: Path) -> None:
    executable = fake_java(tmp_path, "17")
    executable.write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(JavaError, match="names no version: 'hello'"):
        probe(executable)
