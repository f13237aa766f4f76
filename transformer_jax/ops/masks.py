"""Boolean attention masks, True where a query may look; combined with `&`, never by adding large numbers."""

import numpy as np
from jaxtyping import Array, Bool, Int

# The ids of the control pieces, everywhere in this package; `data.tokenizer` maps other models' ids to these.
PAD, EOS, BOS, UNK = 0, 1, 2, 3


def causal_mask(length: int) -> np.ndarray:
    """[1 1 T T]: position t sees positions up to t. A numpy array: a constant of the compiled program."""
    return np.tril(np.ones((length, length), bool))[None, None]


def padding_mask(tokens: Int[Array, "B S"]) -> Bool[Array, "B 1 1 S"]:
    """Keys that are real pieces."""
    return (tokens != PAD)[:, None, None, :]


def segment_mask(queries: Int[Array, "B T"], keys: Int[Array, "B S"]) -> Bool[Array, "B 1 T S"]:
    """A query sees keys of its own sentence, for rows that hold several. Segment 0 is padding and sees nothing."""
    same = queries[:, None, :, None] == keys[:, None, None, :]
    return same & (keys != 0)[:, None, None, :]
