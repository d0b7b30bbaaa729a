"""The secret that a local stack's gateways share."""

from pathlib import Path

from infra.local.stream_secret import stream_secret


def test_it_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    data_dir = tmp_path / "new" / "data"
    secret = stream_secret(data_dir)
    assert len(secret) >= 43
    assert stream_secret(data_dir) == secret
    (file,) = data_dir.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert stream_secret(tmp_path) != secret


def test_a_draft_that_was_left_is_not_used(tmp_path: Path) -> None:
    (tmp_path / ".stream-secret").write_text("half")
    assert len(stream_secret(tmp_path)) >= 43
