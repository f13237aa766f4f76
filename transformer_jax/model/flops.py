"""What a model's arithmetic comes to, from its sizes alone."""

from typing import TypeVar

import numpy as np

from transformer_jax.config import ModelConfig

Pieces = TypeVar("Pieces", int, np.ndarray)

TRAINING = 3
"""Forward and backward against forward: each product is differentiated by both of its factors."""


def forward_flops(config: ModelConfig, source: Pieces, target: Pieces) -> Pieces:
    """Floating-point operations of all products for pairs of `source` and `target` pieces, padding not counted.

    A weight costs a multiplication and an addition for each piece it meets, the output embedding among them; a query
    as many for each number of a key and a value, masked ones included. Norms, softmax and the like are left out.

    Args:
        config: with vocab_size.
        source: pieces of each pair, or of one.
        target: likewise.
    """
    layers, more = config.encoder_layers, config.decoder_layers
    head = config.key_size + config.value_size
    projections = config.d_model * config.num_heads * head  # queries and outputs, or keys and values
    network = 2 * config.d_model * config.d_ff
    per_source = layers * (2 * projections + network) + more * projections
    per_target = more * (3 * projections + network) + config.embedding_rows * config.d_model
    attended = layers * source * source + more * (target * target + target * source)
    return 2 * (per_source * source + per_target * target + config.num_heads * head * attended)
