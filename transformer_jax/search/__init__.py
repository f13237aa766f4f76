"""Search for an output sequence, given any step function: beam search, greedy search, sampling."""

from transformer_jax.search.beam import SearchResult, beam_search, gather_beams, length_penalties
from transformer_jax.search.sampling import greedy_search, sample

__all__ = ["SearchResult", "beam_search", "gather_beams", "greedy_search", "length_penalties", "sample"]
