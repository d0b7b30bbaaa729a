"""What memory a model of the catalogue takes of its GPUs: read from its folder, told as a row or an object.

`published/` holds entries of known models, each without weights and tokenizer: what is to be laid beside them
is what Hugging Face has under their names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.catalog import Catalog, CatalogError, ModelSpec
from schemas.catalog import Deployment as MeantFor
from workers.memory_plan import GB, Deployment, Format, MemoryPlan
from workers.models import gguf_config, hugging_face_config
from workers.models.config_fields import ConfigFields
from workers.models.decoder_config import DecoderConfig
from workers.models.tensor_names import EMBEDDING
from workers.weights.gguf import GGUFFile
from workers.weights.strict_json import parse_json

PUBLISHED = Path(__file__).with_name("published")
# Of an entry that does not say what it is meant for.
_UNTOLD = MeantFor(tensor_parallel=1, device_memory_gb=80, weight_format="bf16", kv_format="bf16")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for in place of what the entry says, where it is not None. `memory_gb` of 10^9 bytes."""

    memory_gb: float | None = None
    tensor_parallel: int | None = None
    weight_format: Format | None = None
    kv_format: Format | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """`name` is the model's id."""

    name: str
    plan: MemoryPlan

    def row(self) -> list[str]:
        plan, deployment = self.plan, self.plan.deployment
        return [
            self.name,
            f"{plan.num_parameters / 1e9:.2f} B",
            f"{deployment.tensor_parallel}x{deployment.device_bytes / GB:g} GB",
            f"{deployment.weight_format} {plan.weight_bytes / GB:.1f} GB",
            f"{plan.step_bytes / GB:.1f} GB",
            f"{deployment.kv_format} {plan.kv_bytes_per_token / 1024:g} KiB",
            f"{plan.kv_tokens:,}",
            "fits" if plan.fits else plan.remedy(),
        ]

    def view(self) -> dict[str, Any]:
        plan, deployment = self.plan, self.plan.deployment
        return {
            "model": self.name,
            "num_parameters": plan.num_parameters,
            "tensor_parallel": deployment.tensor_parallel,
            "device_bytes": deployment.device_bytes,
            "usable_bytes": plan.usable_bytes,
            "weight_format": deployment.weight_format,
            "weight_bytes": plan.weight_bytes,
            "step_bytes": plan.step_bytes,
            "kv_format": deployment.kv_format,
            "kv_bytes_per_token": plan.kv_bytes_per_token,
            "bytes_per_block": plan.bytes_per_block,
            "num_blocks": plan.num_blocks,
            "kv_tokens": plan.kv_tokens,
            "max_model_len": plan.max_model_len,
            "fits": plan.fits,
            "problem": plan.problem(),
            "remedy": None if plan.fits else plan.remedy(),
        }


HEADINGS = ("model", "weights", "GPUs", "on each", "step", "KV a token", "KV tokens", "")
"""Of `ModelPlan.row`. A step is of each GPU, a token's KV of all together."""


def known_models(models_dir: Path) -> dict[str, Path]:
    """The folder of each model of the catalogue that has weights, and of each published one beside them."""
    found = {}
    for folder in (PUBLISHED, models_dir):
        catalog = Catalog.load(folder)
        found.update({name: folder / name for name in catalog.on_disk()})
    return found


def plans(models_dir: Path, name: str | None, asked: Asked) -> Iterator[ModelPlan]:
    """Of the model of that name, or of all. Raises CatalogError, WeightsError, OSError, or ValueError for
    GPUs that the model cannot be split over."""
    folders = known_models(models_dir)
    if name is not None and name not in folders:
        raise CatalogError(f"no model {name!r} (there: {', '.join(sorted(folders))})")
    for each in [name] if name is not None else sorted(folders):
        folder = folders[each]
        spec = Catalog.load(folder.parent).get(each)
        config, vocab_size = read_config(folder / spec.weights)
        yield ModelPlan(each, MemoryPlan(config, vocab_size, _deployment(spec, asked)))


def read_config(weights: Path) -> tuple[DecoderConfig, int]:
    """Of a GGUF file, or of the config.json beside weights that need not be there; and the vocabulary's size.

    Raises WeightsError for what is not implemented, OSError for a file that is not there.
    """
    if weights.suffix == ".gguf":
        with GGUFFile(weights) as gguf:
            return (
                gguf_config.decoder_config(gguf.metadata, gguf.tensors, str(weights)),
                gguf.info(EMBEDDING).shape[0],
            )
    source = weights.with_name("config.json")
    values = parse_json(source.read_bytes(), str(source))
    config = hugging_face_config.decoder_config(values, str(source))
    fields = ConfigFields(values, str(source))
    return config, (fields.inner("text_config") or fields).integer("vocab_size")


def _deployment(spec: ModelSpec, asked: Asked) -> Deployment:
    meant = spec.deployment or _UNTOLD
    return Deployment(
        device_bytes=int((asked.memory_gb or meant.device_memory_gb) * GB),
        tensor_parallel=asked.tensor_parallel or meant.tensor_parallel,
        weight_format=asked.weight_format or Format(meant.weight_format),
        kv_format=asked.kv_format or Format(meant.kv_format),
        max_model_len=min(asked.max_model_len or spec.max_model_len, spec.max_model_len),
        max_num_batched_tokens=asked.max_num_batched_tokens,
        max_num_seqs=asked.max_num_seqs,
    )
