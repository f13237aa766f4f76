"""Sinusoidal positions (section 3.5)."""

from typing import Literal

import numpy as np


def sinusoids(length: int, d_model: int, layout: Literal["interleaved", "concatenated"] = "interleaved") -> np.ndarray:
    """Positions 0 to length - 1, float32 [T D]: a constant of the compiled program, computed in float64.

    interleaved, the paper: PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(same). concatenated,
    tensor2tensor: all sines, then all cosines, and the exponent's divisor is d_model / 2 - 1, so that the slowest
    frequency is exactly 1 / 10000.
    """
    pairs = d_model // 2
    exponent = np.arange(pairs) / (pairs if layout == "interleaved" else max(pairs - 1, 1))
    angles = np.arange(length)[:, None] * 10000.0**-exponent
    waves = np.stack([np.sin(angles), np.cos(angles)], axis=-1 if layout == "interleaved" else 1)
    return waves.reshape(length, d_model).astype(np.float32)
