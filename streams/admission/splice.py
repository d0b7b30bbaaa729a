"""A Dispatch from the request's own bytes: a prompt is not encoded again to be passed on.

Avro writes a record as its fields one after the other, so a Dispatch is three longs, the request's body as it
came, and its pairing (Avro specification 1.12, "Data Serialization and Deserialization").
"""

from schemas.codec import HEADER_BYTES, default_codec, encode
from schemas.records import Dispatch, InferenceRequest, Pairing, SamplingParams

_PROBE = InferenceRequest(bytes(16), 1, "", 0, "", [], [], SamplingParams(1), 0, 0, 0, 0)
_REQUEST_HEADER = encode(_PROBE)[:HEADER_BYTES]
_DISPATCH_HEADER = encode(Dispatch(0, 0, 0, _PROBE))[:HEADER_BYTES]


def encode_dispatch(dispatch: Dispatch, request_record: bytes) -> bytes:
    """`encode(dispatch)`, with `request_record` the record that `dispatch.request` was decoded from."""
    if request_record[:HEADER_BYTES] != _REQUEST_HEADER:
        return default_codec().encode(dispatch)  # written by another version of the schema
    numbers = _long(dispatch.slot) + _long(dispatch.epoch) + _long(dispatch.expected_output_tokens)
    return _DISPATCH_HEADER + numbers + request_record[HEADER_BYTES:] + _pairing(dispatch.pairing)


def _pairing(pairing: Pairing | None) -> bytes:
    """The union's branch, and what is in it."""
    if pairing is None:
        return _long(0)
    name = _long(len(pairing.transfer_id)) + pairing.transfer_id
    slot, epoch = _long(pairing.decode_slot), _long(pairing.decode_epoch)
    return _long(1) + name + slot + epoch + _long(pairing.reserve_ms) + _long(pairing.lease_ms)


def _long(value: int) -> bytes:
    """Avro's zigzag varint of a number that is not negative."""
    rest = value << 1
    out = bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)
