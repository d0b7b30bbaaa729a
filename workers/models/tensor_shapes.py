"""Which tensors a decoder has, and of what shape. Pure: nothing of it comes from a file."""

from collections.abc import Iterator

from workers.models.decoder_config import DecoderConfig
from workers.models.tensor_names import EMBEDDING, OUTPUT, OUTPUT_NORM, in_layer


def tensor_shapes(config: DecoderConfig, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """All tensors by our names."""
    hidden, query, kv = config.hidden_size, config.query_size, config.kv_size
    yield EMBEDDING, (vocab_size, hidden)
    yield OUTPUT_NORM, (hidden,)
    if not config.tied_embeddings:
        yield OUTPUT, (vocab_size, hidden)
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if config.post_norms:
        norms |= {"post_attention_norm": hidden, "post_ffw_norm": hidden}
    if config.qk_norm:
        norms |= {"attn_q_norm": config.head_dim, "attn_k_norm": config.head_dim}
    matrices = {
        "attn_q": (query, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, query),
        "ffn_gate": (config.intermediate_size, hidden),
        "ffn_up": (config.intermediate_size, hidden),
        "ffn_down": (hidden, config.intermediate_size),
    }
    for index in range(config.num_layers):
        for part, size in norms.items():
            yield in_layer(index, part), (size,)
        for part, shape in matrices.items():
            yield in_layer(index, part), shape
        if config.qkv_bias:
            for part in ("attn_q", "attn_k", "attn_v"):
                yield in_layer(index, part, "bias"), matrices[part][:1]
