"""Small random models as entries of a catalogue, which workers serve as any other."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from schemas.tokenization import simulated_tokenizer
from tests.decoder_files import CONFIGS, make_tensors, write_safetensors


def make_model(models_dir: Path, family: str, **fields: Any) -> None:
    """A folder of the catalogue: the family's weights, and bytes as tokens. `fields` are the entry's own."""
    folder = models_dir / family
    folder.mkdir(parents=True)
    write_safetensors(folder, CONFIGS[family], make_tensors(CONFIGS[family]), 2)
    tokenizer: Tokenizer = simulated_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    spec = {
        "id": family,
        "architecture": family,
        "weights": "model.safetensors.index.json",
        "tokenizer": "tokenizer.json",
        "max_model_len": 256,
        "bos_token_id": 256,
        "add_bos": True,
        "eos_token_ids": [257],
    }
    (folder / "model.json").write_text(json.dumps(spec | fields))
