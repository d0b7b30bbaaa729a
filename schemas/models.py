"""Models ready to turn text into token ids and back: catalogue entry, tokenizer, chat template."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from schemas.catalog import Catalog, CatalogError, ModelSpec
from schemas.chat_template import ChatTemplate
from schemas.template_source import tool_call_format
from schemas.tokenization import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    spec: ModelSpec
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    @property
    def takes_tools(self) -> bool:
        """It can be told of tools, and its calls can be read."""
        return bool(self.spec.tool_call_format)

    @classmethod
    def load(cls, catalog: Catalog, model_id: str) -> "LoadedModel":
        """Takes about a second for a vocabulary of 262,144. Raises CatalogError or ValueError."""
        spec = catalog.get(model_id)
        tokenizer = Tokenizer.load(catalog, model_id)
        template = ChatTemplate(spec.chat_template, tokenizer) if spec.chat_template else None
        if template and template.takes_tools and not spec.tool_call_format:
            spec = replace(spec, tool_call_format=tool_call_format(spec.chat_template))
        if spec.tool_call_format and not (template and template.takes_tools):
            raise CatalogError(
                f"model {model_id!r}: field 'tool_call_format' is set, but its chat_template has no tools"
            )
        return cls(spec, tokenizer, template)


def load_models(catalog: Catalog, model_ids: Iterable[str]) -> dict[str, LoadedModel]:
    """The models named, or with no names all of the catalogue's folder."""
    names = list(model_ids) or catalog.on_disk()
    return {name: LoadedModel.load(catalog, name) for name in names}
