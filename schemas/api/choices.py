"""Several answers to one body: each is a request of its own, its id and seed derived from the body's."""

import hashlib

MAX_N = 16
# Prompts times n. Every choice has its stream's id, of 64 characters, in one header of the response.
MAX_CHOICES = 32


def choice_request_id(request_id: bytes, index: int) -> bytes:
    """16 bytes; `index` from 0. The first choice is the request that the client knows by x-request-id."""
    if index == 0:
        return request_id
    return hashlib.blake2b(request_id + index.to_bytes(2, "big"), digest_size=16, person=b"choice").digest()


def choice_seed(seed: int, i: int) -> int:
    """Of the i-th output of one prompt: the first has the seed that was asked for, as if it were alone."""
    if i == 0:
        return seed
    data = seed.to_bytes(8, "big", signed=True) + i.to_bytes(2, "big")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"choice seed").digest(), "big") >> 1
