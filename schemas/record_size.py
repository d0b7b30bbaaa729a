"""What fits a record of the log, and what Kafka says of one that does not. Pure."""

from schemas.topics import MAX_RECORD_BYTES

# Of a request beside its token ids: the longest grammar, stop strings and biases are a third of it.
_OTHER_BYTES = 256 << 10
# Avro's form of an id below 2^27.
_TOKEN_BYTES = 4
# Prompt and output: a request of more could not be sent to a worker, or not again once it has its output.
MAX_REQUEST_TOKENS = (MAX_RECORD_BYTES - _OTHER_BYTES) // _TOKEN_BYTES

# MESSAGE_TOO_LARGE and RECORD_LIST_TOO_LARGE (Kafka protocol guide, "Error Codes").
_TOO_LARGE = (10, 18)


def is_too_large(error: BaseException) -> bool:
    """Whether a record was refused for its size: a topic may have been made to take less than ours do.
    Another try is of no use."""
    return getattr(error, "errno", None) in _TOO_LARGE
