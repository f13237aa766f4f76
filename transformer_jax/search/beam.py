"""Beam search (section 6.1) over any step function.

What is searched: every sequence that ends with EOS within its sentence's maximal length ("finished"), and every
sequence of exactly that length without EOS ("cut"). Together they hold all of the model's probability, each sequence
once. Both kinds compete by one score, that of Wu et al. (2016) without coverage, which the paper uses with alpha = 0.6:

    score(Y) = log P(Y | X) / ((5 + |Y|) / 6)^alpha,    |Y| counts EOS.

How: at every position the 2M best extensions of a sentence's M live sequences are candidates. At most M of them end
with EOS, so M can live on. Those that end join the sentence's list of ended hypotheses if they are among its best. The
sentence is done when the last of that list cannot be beaten: a live sequence's log-probability only falls, and the
divisor is largest at the maximal length, so log P(live) / ((5 + maximal length) / 6)^alpha bounds whatever may come of
it. The stop therefore never changes a result. A done sentence's list is frozen while the rest of its batch goes on.

Letters: B sentences, M beams, T maximal length of the batch, W word pieces, P forced pieces. Shapes at the end of a
line are those of its result.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.errors import UserError

Cache = TypeVar("Cache")
Tree = TypeVar("Tree")


_GROUP_SIZES = range(32, 129)  # of `best_pieces`, the first that divides the number of pieces


class SearchResult(NamedTuple):
    """Hypotheses of each sentence, the best first; M of them (or n_best).

    Where a sentence has fewer hypotheses of non-zero probability than that (tiny vocabularies only), the slots that
    remain have score and log_prob -inf, length 0, and tokens that are all PAD.
    """

    tokens: Int[Array, "B M T"]
    """Word pieces: EOS included where there is one, PAD after it."""
    scores: Float[Array, "B M"]
    """log_probs / ((5 + lengths) / 6)^alpha, never increasing along M."""
    lengths: Int[Array, "B M"]
    """Pieces of each hypothesis, EOS counted."""
    log_probs: Float[Array, "B M"]
    """log P(Y | X), natural logarithm: the sum of token_log_probs."""
    token_log_probs: Float[Array, "B M T"]
    """log P of each piece given those before it; 0 after the end."""
    finished: Bool[Array, "B M"]
    """True if it ends with EOS, False if it was cut at the maximal length."""


class _Live(NamedTuple):
    """Sequences that go on, the best first."""

    tokens: Array  # [B M T]
    token_log_probs: Array  # [B M T]
    log_probs: Array  # [B M]


class _Candidates(NamedTuple):
    """Extensions of live sequences by one piece, the best first."""

    parents: Array  # [B 2M], which of the M was extended
    tokens: Array  # [B 2M], by which piece
    token_log_probs: Array  # [B 2M]
    log_probs: Array  # [B 2M], of the whole sequence


class _State(NamedTuple):
    position: Array  # []
    cache: Any
    previous: Array  # [B M], the pieces to feed next
    live: _Live
    ended: SearchResult
    done: Array  # [B]


def length_penalties(max_length: int, alpha: float | Float[Array, ""]) -> Float[Array, "lengths"]:
    """((5 + n) / 6)^alpha for n = 0 .. max_length, float32: the divisor of a score at each length, EOS counted."""
    return ((5.0 + jnp.arange(max_length + 1, dtype=jnp.float32)) / 6.0) ** alpha


def gather_beams(cache: Cache, parents: Int[Array, "BM"]) -> Cache:
    """Rows `parents` of axis 0 of every array in `cache`; scalars, shared by all rows, stay as they are.

    For caches with another layout, or too large to move at every step, pass `beam_search` a `reorder` of their own.
    """

    def gather(leaf: Array) -> Array:
        return leaf.at[parents].get(mode="promise_in_bounds") if jnp.ndim(leaf) else leaf

    gathered: Cache = jax.tree.map(gather, cache)
    return gathered


def beam_search(
    step: Callable[[Cache, Array], tuple[Array, Cache]],
    cache: Cache,
    *,
    first_tokens: Int[Array, "B"],
    max_lengths: Int[Array, "B"],
    max_length: int,
    beam_size: int,
    length_penalty: float | Float[Array, ""],
    eos_id: int,
    pad_id: int,
    n_best: int | None = None,
    prefix: Int[Array, "B P"] | None = None,
    reorder: Callable[[Cache, Array], Cache] = gather_beams,
) -> SearchResult:
    """Find the `n_best` hypotheses of highest score in each sentence, by beam search; traceable by `jax.jit`.

    A sentence's result does not depend on the others in its batch. Of equal scores, that which ended earlier comes
    first. With `beam_size=1` this is not greedy search: it keeps two candidates, so it may end where greedy search goes
    on, or go on where greedy search ends, and return what scores better. It never returns worse than `greedy_search`.

    Args:
        step: (cache, tokens [B*M]) -> (log_probs [B*M W], cache): feeds one piece to each row and gives the
            log-probabilities, at most 0, of the piece that follows; -inf forbids a piece. Row b*M + m is sentence b's
            beam m.
        cache: Any pytree, of B*M rows already. It keeps the position, if `step` needs one.
        first_tokens: What `step` is fed first (BOS); no part of the result.
        max_lengths: Most pieces of each sentence's hypotheses, EOS counted. 0 for a row that is padding: it is not
            searched, and its slots come back empty. Values above `max_length` mean `max_length`.
        max_length: T, static, at least the largest of max_lengths.
        beam_size: M, static: live sequences of each sentence.
        length_penalty: alpha, at least 0. It may be traced, so that several values share one compilation.
        eos_id: The piece that ends a sequence.
        pad_id: Fills tokens after the end.
        n_best: Hypotheses to return, static; None: beam_size. Fewer let the search stop sooner, and are the same that
            a longer list begins with.
        prefix: Pieces each sentence's hypotheses must begin with; PAD leaves a position free. Their log-probabilities
            count in the score.
        reorder: (cache, parents [B*M]) -> cache whose row i continues row parents[i]. Not called where M is 1.

    Raises:
        UserError: beam_size, n_best, length_penalty or max_length is out of range.
    """
    hypotheses = beam_size if n_best is None else n_best
    _check(beam_size, hypotheses, length_penalty, max_length)
    batch = first_tokens.shape[0]
    max_lengths = jnp.minimum(max_lengths, max_length)
    # The product with this is what all scores and bounds are made by: XLA turns some divisions into such products and
    # leaves others, and two ways of rounding would part equal scores.
    weights = 1.0 / length_penalties(max_length, length_penalty)  # [T+1]
    forced = None if prefix is None else forced_tokens(prefix, max_length, pad_id)

    def advance(state: _State) -> _State:
        log_probs, cache = step(state.cache, state.previous.reshape(-1))  # [B*M W]
        forced_now = None if forced is None else forced[:, state.position]
        candidates = _expand(state.live.log_probs, log_probs.astype(jnp.float32), forced_now, pad_id)
        last = state.position + 1 >= max_lengths  # [B]
        is_eos = candidates.tokens == eos_id  # [B 2M]
        ends = is_eos | last[:, None]  # [B 2M]
        extended = _extend(state.live, candidates, state.position)  # [B 2M T]
        admitted = ends & ~state.done[:, None]
        ended = _collect(state.ended, extended, is_eos, admitted, state.position + 1, weights)
        live_log_probs, chosen = lax.top_k(jnp.where(ends, -jnp.inf, candidates.log_probs), beam_size)  # [B M]
        live = _take(extended, chosen)._replace(log_probs=live_log_probs)
        if beam_size > 1:
            parents = _take(candidates.parents, chosen) + beam_size * jnp.arange(batch)[:, None]  # [B M]
            cache = reorder(cache, parents.reshape(-1))
        bound = live.log_probs[:, 0] * weights[max_lengths]  # [B]
        done = state.done | last | (ended.scores[:, -1] >= bound)
        return _State(state.position + 1, cache, _take(candidates.tokens, chosen), live, ended, done)

    state = lax.while_loop(
        lambda state: ~state.done.all(),
        advance,
        _first_state(cache, first_tokens, max_lengths, max_length, beam_size, hypotheses, pad_id),
    )
    return clear_empty(state.ended, pad_id)


def _check(beam_size: int, n_best: int, length_penalty: float | Array, max_length: int) -> None:
    if beam_size < 1:
        raise UserError(f"beam_size is {beam_size}, but must be at least 1")
    if not 1 <= n_best <= beam_size:
        raise UserError(f"n_best is {n_best}, but must be from 1 to beam_size ({beam_size}): change one of the two")
    check_lengths(length_penalty, max_length)


def check_lengths(length_penalty: float | Array, max_length: int) -> None:
    """Raise UserError unless alpha (if not traced) is at least 0, as the bound needs, and max_length at least 1."""
    if isinstance(length_penalty, int | float) and not length_penalty >= 0:
        raise UserError(f"length_penalty is {length_penalty}, but must be at least 0")
    if max_length < 1:
        raise UserError(f"max_length is {max_length}, but must be at least 1")


def forced_tokens(prefix: Int[Array, "B P"], max_length: int, pad_id: int) -> Int[Array, "B T"]:
    """`prefix` cut or filled with PAD to `max_length` columns; PAD marks a free position."""
    kept = prefix[:, :max_length].astype(jnp.int32)
    return jnp.pad(kept, ((0, 0), (0, max_length - kept.shape[1])), constant_values=pad_id)


def clear_empty(result: SearchResult, pad_id: int) -> SearchResult:
    """`result` with the slots of score -inf, which hold no hypothesis, made as SearchResult describes them."""
    empty = result.scores == -jnp.inf  # [B M]
    return SearchResult(
        tokens=jnp.where(empty[:, :, None], pad_id, result.tokens),
        scores=result.scores,
        lengths=jnp.where(empty, 0, result.lengths),
        log_probs=jnp.where(empty, -jnp.inf, result.log_probs),
        token_log_probs=jnp.where(empty[:, :, None], 0.0, result.token_log_probs),
        finished=result.finished & ~empty,
    )


def _first_state(
    cache: Any, first_tokens: Array, max_lengths: Array, max_length: int, beam_size: int, hypotheses: int, pad_id: int
) -> _State:
    batch = first_tokens.shape[0]
    live = _Live(
        tokens=jnp.full((batch, beam_size, max_length), pad_id, jnp.int32),
        token_log_probs=jnp.zeros((batch, beam_size, max_length), jnp.float32),
        # All beams are equal at first: with one alive, no hypothesis is ever found twice.
        log_probs=jnp.tile(jnp.where(jnp.arange(beam_size) == 0, 0.0, -jnp.inf), (batch, 1)).astype(jnp.float32),
    )
    ended = SearchResult(
        tokens=jnp.zeros((batch, hypotheses, max_length), jnp.int32),
        scores=jnp.full((batch, hypotheses), -jnp.inf, jnp.float32),
        lengths=jnp.zeros((batch, hypotheses), jnp.int32),
        log_probs=jnp.zeros((batch, hypotheses), jnp.float32),
        token_log_probs=jnp.zeros((batch, hypotheses, max_length), jnp.float32),
        finished=jnp.zeros((batch, hypotheses), bool),
    )
    previous = jnp.tile(first_tokens.astype(jnp.int32)[:, None], (1, beam_size))  # [B M]
    return _State(jnp.int32(0), cache, previous, live, ended, max_lengths < 1)


def _expand(live_log_probs: Array, log_probs: Array, forced: Array | None, pad_id: int) -> _Candidates:
    """The 2M best extensions of each sentence; where `forced` [B] is no PAD, extensions by that piece only."""
    batch, beams = live_log_probs.shape
    width = min(2 * beams, log_probs.shape[-1])
    # The best of each row first, then of the rows' best: 2M of M*W without adding to all M*W.
    best, tokens = best_pieces(log_probs, width)  # [B*M 2M]
    if forced is not None:
        piece = jnp.repeat(forced, beams)[:, None]  # [B*M 1]
        piece_log_probs = jnp.take_along_axis(log_probs, piece, axis=1)  # [B*M 1]
        only = jnp.where(jnp.arange(width) == 0, piece_log_probs, -jnp.inf)  # [B*M 2M]
        best = jnp.where(piece == pad_id, best, only)
        tokens = jnp.where(piece == pad_id, tokens, piece)
    best, tokens = best.reshape(batch, -1), tokens.reshape(batch, -1)  # [B M*2M]
    sums = jnp.repeat(live_log_probs, width, axis=1) + best  # [B M*2M]
    sums, chosen = lax.top_k(sums, min(2 * beams, beams * width))  # [B 2M]
    return _Candidates(chosen // width, _take(tokens, chosen), _take(best, chosen), sums)


def best_pieces(log_probs: Array, count: int) -> tuple[Array, Array]:
    """The `count` best of each row and which they are, the best first, in less time than `lax.top_k`: a third of
    it for 8,000 pieces, a sixth for 37,000, hardly less for 3,000.

    That sorts a row whole, or keeps a heap over it. No piece is among the best unless its group is among the best by
    its largest member, so that only these groups' members are compared. Where the last of the list has equals outside
    of it, another of them may be taken than `lax.top_k` would.
    """
    rows, pieces = log_probs.shape
    # A size that divides spares a copy of all.
    size = next((size for size in _GROUP_SIZES if pieces % size == 0), None)
    if size is None or pieces < 4 * count * size:
        best, tokens = lax.top_k(log_probs, count)
        return best, tokens
    groups = log_probs.reshape(rows, -1, size)
    _, chosen = lax.top_k(groups.max(axis=2), count)  # [B*M 2M]
    chosen = chosen.sort(axis=1)  # so that of equal pieces the first is found
    members = jnp.take_along_axis(groups, chosen[:, :, None], axis=1, mode="promise_in_bounds")
    best, at = lax.top_k(members.reshape(rows, -1), count)  # [B*M 2M]
    group = jnp.take_along_axis(chosen, at // size, axis=1, mode="promise_in_bounds")
    return best, group * size + at % size


def _extend(live: _Live, candidates: _Candidates, position: Array) -> _Live:
    """The candidates as whole sequences."""
    parents = _take(live, candidates.parents)  # [B 2M T]
    return _Live(
        tokens=parents.tokens.at[:, :, position].set(candidates.tokens),
        token_log_probs=parents.token_log_probs.at[:, :, position].set(candidates.token_log_probs),
        log_probs=candidates.log_probs,
    )


def _collect(
    ended: SearchResult, extended: _Live, is_eos: Array, admitted: Array, length: Array, weights: Array
) -> SearchResult:
    """The best of the ended hypotheses and the admitted candidates, as many as `ended` has slots."""
    arrivals = SearchResult(
        tokens=extended.tokens,
        scores=jnp.where(admitted, extended.log_probs * weights[length], -jnp.inf),
        lengths=jnp.full_like(ended.lengths, length, shape=is_eos.shape),
        log_probs=extended.log_probs,
        token_log_probs=extended.token_log_probs,
        finished=is_eos,
    )
    both = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), ended, arrivals)
    # top_k prefers the lower index among equals, so what ended earlier stays first.
    _, chosen = lax.top_k(both.scores, ended.scores.shape[1])
    best: SearchResult = _take(both, chosen)
    return best


def _take(tree: Tree, chosen: Array) -> Tree:
    """For each sentence, entries chosen [B K] of axis 1 of every array in `tree`."""

    def take(leaf: Array) -> Array:
        index = chosen.reshape(chosen.shape + (1,) * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, index, axis=1, mode="promise_in_bounds")

    taken: Tree = jax.tree.map(take, tree)
    return taken
