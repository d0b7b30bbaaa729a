"""Which models a service offers: those that it was started with, and those that control.models tells of."""

import asyncio
import logging
from pathlib import Path

from schemas.catalog import Catalog, CatalogError
from schemas.models import LoadedModel
from schemas.records import Model

log = logging.getLogger(__name__)


class OfferedModels:
    """`models`, by id, are offered; it is changed in place. `loaded` are also those that were: their streams
    can still be read.
    """

    def __init__(self, models_dir: Path, models: dict[str, LoadedModel]) -> None:
        """`models` are those that the service was started with: they are always offered."""
        self.models = models
        self.loaded = dict(models)
        self._models_dir = models_dir
        self._started_with = frozenset(models)
        self._told: asyncio.Queue[tuple[str, Model | None]] = asyncio.Queue()

    def tell(self, name: str, model: Model | None) -> None:
        """The newest record of a model, None where it was taken back. In force when `run` comes to it."""
        self._told.put_nowait((name, model))

    async def catch_up(self) -> None:
        """Returns when all that was told is in force."""
        while not self._told.empty():
            await self._take(*self._told.get_nowait())

    async def run(self) -> None:
        while True:
            await self._take(*await self._told.get())

    async def _take(self, name: str, model: Model | None) -> None:
        if model is None:
            if name not in self._started_with:
                self.models.pop(name, None)
            return
        if name not in self.loaded:
            try:
                self.loaded[name] = await asyncio.to_thread(self._load, name)
            except (CatalogError, ValueError, OSError) as error:
                log.error("a model of control.models cannot be offered here: %s", error)
                return
        self.models[name] = self.loaded[name]

    def _load(self, name: str) -> LoadedModel:
        return LoadedModel.load(Catalog.load(self._models_dir), name)
