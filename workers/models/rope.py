"""Cosines and sines that a decoder's layers rotate with."""

from math import pi

import torch
from torch import Tensor

from kernels.rotary_embedding_ref import cos_sin_table, rotary_frequencies
from workers.models.decoder_config import DecoderConfig, LinearScaling, Llama3Scaling, RopeScaling


def cos_sin_caches(
    config: DecoderConfig, max_positions: int, factors: Tensor | None
) -> dict[int | None, Tensor]:
    """By sliding window: fp32 [max_positions, 2, head_dim / 2].

    factors: fp32 [head_dim / 2], what the global frequencies are divided by beside the config's scaling
    (GGUF's `rope_freqs`), or None.
    """
    frequencies = scaled(rotary_frequencies(config.rope_base, config.head_dim), config.rope_scaling)
    if factors is not None:
        frequencies = frequencies / factors
    whole = cos_sin_table(frequencies, max_positions)
    if config.local_rope_base is None:
        local = whole
    else:
        local = cos_sin_table(rotary_frequencies(config.local_rope_base, config.head_dim), max_positions)
    return {window: whole if window is None else local for window in {None, *config.layer_windows}}


def scaled(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Frequencies for longer contexts than a model was first trained for."""
    match scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling(factor, low, high, original):
            # As Meta's `apply_scaling` (llama-models, llama3/model.py).
            wave_lengths = 2 * pi / frequencies
            smooth = (original / wave_lengths - low) / (high - low)
            between = (1 - smooth) * frequencies / factor + smooth * frequencies
            scaled_or_between = torch.where(wave_lengths > original / low, frequencies / factor, between)
            return torch.where(wave_lengths < original / high, frequencies, scaled_or_between)
