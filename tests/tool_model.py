"""A catalogue entry whose chat template knows tools: bytes as tokens, calls as Hermes and Qwen write them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from schemas.catalog import Catalog, ModelSpec, simulated_model
from schemas.models import LoadedModel

TOOL_MODEL = "caller"
TEMPLATE = """\
{%- if tools %}<|tools|>{% for tool in tools %}{{ tool | tojson }}{{ "\\n" }}{% endfor %}{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
SPEC: ModelSpec = dataclasses.replace(
    simulated_model(), id=TOOL_MODEL, chat_template=TEMPLATE, tool_call_format="hermes"
)
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def tool_model() -> LoadedModel:
    return LoadedModel.load(Catalog([SPEC], Path()), TOOL_MODEL)


def put_in_catalogue(models_dir: Path) -> None:
    folder = models_dir / TOOL_MODEL
    folder.mkdir()
    (folder / "model.json").write_text(json.dumps(dataclasses.asdict(SPEC)))
