"""Names for the contents of full KV blocks: equal names, equal tokens since the start of the sequence."""

import struct
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b

from workers.block_pool import BLOCK_SIZE

# 256 bits: with fewer, who may send any prompt could look for two that collide.
_DIGEST_BYTES = 32
_MAX_TOKEN_ID = (1 << 32) - 1
_MAX_ROOTS = 4096


class PrefixSharing(StrEnum):
    """Whose blocks a request may find: those of its tenant, or everybody's."""

    TENANT = "tenant"
    SHARED = "shared"


class BlockHasher:
    """Chained hashes of full blocks: each is a function of its parent's and of `block_size` token ids.

    What else the KV depends on, or who may see it, is in the root of the chain, so that two chains of
    different roots never meet: the model, the layout (dtype, block size, kind of kernels: a deterministic and
    a fast cache differ in their last bits), the tenant unless all share, and the adapter.

    A request is looked up under its tenant's root alone, so no tenant can learn from a fast answer what
    another one has asked.
    """

    def __init__(self, model: str, layout: str, sharing: PrefixSharing, block_size: int = BLOCK_SIZE) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self._domain = (model, layout, sharing.value, str(block_size))
        self._salted = sharing is PrefixSharing.TENANT
        # Copying a hash object is half as long as making one (0.34 and 0.60 µs).
        self._template = blake2b(digest_size=_DIGEST_BYTES, person=b"headrace-block")
        self.root = lru_cache(maxsize=_MAX_ROOTS)(self._root)

    @property
    def is_shared(self) -> bool:
        """Everybody's blocks can be found by everybody."""
        return not self._salted

    def salt(self, tenant: str) -> str:
        """What keeps a tenant's blocks apart: its name, or nothing where all share."""
        return tenant if self._salted else ""

    def extend(
        self, hashes: list[bytes], token_ids: Sequence[int], tenant: str = "", adapter: str = ""
    ) -> None:
        """Appends to `hashes` those of the next blocks, whose tokens are `token_ids` (whole blocks).

        Raises ValueError when `token_ids` do not fill blocks, or one of them is not in 0 … 2³² - 1.
        """
        if len(token_ids) % self.block_size:
            raise ValueError(f"{len(token_ids)} token ids do not fill blocks of {self.block_size}")
        try:
            packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
        except struct.error as error:
            raise ValueError(f"token ids must be in 0 … {_MAX_TOKEN_ID}: {error}") from error
        parent = hashes[-1] if hashes else self.root(self.salt(tenant), adapter)
        num_bytes = 4 * self.block_size
        for start in range(0, len(packed), num_bytes):
            block = self._template.copy()
            block.update(parent)
            block.update(packed[start : start + num_bytes])
            parent = block.digest()
            hashes.append(parent)

    def _root(self, tenant: str, adapter: str) -> bytes:
        root = blake2b(digest_size=_DIGEST_BYTES, person=b"headrace-root")
        for part in (*self._domain, tenant, adapter):
            encoded = part.encode()
            root.update(struct.pack("<I", len(encoded)))
            root.update(encoded)
        return root.digest()
