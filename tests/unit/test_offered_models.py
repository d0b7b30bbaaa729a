"""Models that are offered and taken back while a service runs."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from schemas.catalog import Catalog, simulated_model
from schemas.models import load_models
from schemas.offered_models import OfferedModels
from schemas.records import Model


@pytest.fixture
def offered(tmp_path: Path) -> OfferedModels:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        spec = dataclasses.replace(simulated_model(), id=name)
        (tmp_path / name / "model.json").write_text(json.dumps(dataclasses.asdict(spec)))
    return OfferedModels(tmp_path, load_models(Catalog.load(tmp_path), ["first"]))


async def test_who_holds_the_mapping_sees_a_model_come_and_go(offered: OfferedModels) -> None:
    models = offered.models
    offered.tell("second", Model("second"))
    await offered.catch_up()
    assert models.keys() == {"first", "second"}
    offered.tell("second", None)
    await offered.catch_up()
    assert models.keys() == {"first"}
    assert offered.loaded.keys() == {"first", "second"}  # its streams can be read on


async def test_what_it_was_started_with_stays(offered: OfferedModels) -> None:
    offered.tell("first", Model("first", ["second"]))
    offered.tell("first", None)
    await offered.catch_up()
    assert offered.models.keys() == {"first"}


async def test_a_model_without_files_stops_nobody(
    offered: OfferedModels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    offered.tell("absent", Model("absent"))
    offered.tell("second", Model("second"))
    with caplog.at_level(logging.ERROR):
        await offered.catch_up()
    assert offered.models.keys() == {"first", "second"}
    assert "no model 'absent' in" in caplog.text
    # Its folder is put there, and it is told of again.
    (tmp_path / "second").rename(tmp_path / "absent")
    spec = dataclasses.replace(simulated_model(), id="absent")
    (tmp_path / "absent" / "model.json").write_text(json.dumps(dataclasses.asdict(spec)))
    offered.tell("absent", Model("absent"))
    await offered.catch_up()
    assert "absent" in offered.models
