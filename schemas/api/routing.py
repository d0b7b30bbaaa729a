"""What a body says about where its request shall run: what it belongs together with, and which models may."""

from dataclasses import dataclass
from hashlib import blake2b

from msgspec import Struct


@dataclass(frozen=True, slots=True)
class Routing:
    """`affinity_key`: requests of a tenant with the same one do well on the same worker, which has their
    beginning cached. `allow_fallback`: one of the model's fallback models may answer under overload."""

    affinity_key: str | None = None
    allow_fallback: bool = True


def routing(body: Struct) -> Routing:
    """By the fields that the APIs have for it: `prompt_cache_key`, else who the user is."""
    key = getattr(body, "prompt_cache_key", None) or getattr(body, "user", None)
    metadata = getattr(body, "metadata", None)
    if not key and isinstance(metadata, Struct):
        key = getattr(metadata, "user_id", None)  # Anthropic's
    return Routing(key or None, getattr(body, "allow_fallback", True))


def affinity_hash(tenant: str, key: str | None) -> int | None:
    """63 bits: tenants' keys are not in the log, and one tenant's say nothing about another's."""
    if key is None:
        return None
    digest = blake2b(key.encode(errors="surrogatepass"), digest_size=8, key=tenant.encode()[:64])
    return int.from_bytes(digest.digest(), "big") >> 1
