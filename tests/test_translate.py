"""make_translate and make_score: what the search says of a model is what the model says."""

import jax
import numpy as np
import pytest
from small_models import BOS, EOS, PAD, VOCABULARY, random_params, rows, sentence, small_config

from transformer_jax.config import SearchConfig
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.translation.translate import make_score, make_translate


def with_eos_bias(params, bias):
    """Parameters of an untied post-norm model whose logit of EOS is `bias`, and which never gives PAD or BOS.

    The last norm makes feature 0 the constant 1; the rows of these pieces in the output embedding are 0 elsewhere.
    """
    params = jax.tree.map(np.array, params)
    norm = params["decoder"]["residual_3"]["norm"]
    norm["scale"][-1, 0], norm["bias"][-1, 0] = 0.0, 1.0
    params["output_embedding"][[PAD, EOS, BOS]] = 0.0
    params["output_embedding"][[PAD, EOS, BOS], 0] = -1e9, bias, -1e9
    return params


def biased_model(bias, **changes):
    config = small_config(tied_embeddings=False, **changes)
    return config, with_eos_bias(random_params(config), bias)


def searched(config, params, source, **search):
    return jax.device_get(make_translate(config, SearchConfig(**search))(params, source))


def test_every_printed_score_is_what_forced_decoding_gives():
    """B4, P2: ended and cut hypotheses, positions beyond max_positions; EOS counts in the length."""
    config, params = biased_model(0.2, decoder_layers=3, max_positions=16)
    source = rows([[*sentence(2), EOS], [*sentence(40), EOS]], 48)
    found = searched(config, params, source, beam_size=4, n_best=4, length_penalty=0.6, max_extra_length=3)
    assert found.finished.any() and not found.finished.all()
    assert np.isfinite(found.scores).all()
    score = make_score(config)
    for beam in range(4):
        tokens = found.tokens[:, beam]
        log_probs = np.asarray(score(params, source, tokens))
        lengths = (tokens != PAD).sum(axis=1)
        np.testing.assert_allclose(log_probs, found.token_log_probs[:, beam], atol=1e-4)
        np.testing.assert_array_equal(lengths, found.lengths[:, beam])
        np.testing.assert_allclose(log_probs.sum(axis=1) / ((5 + lengths) / 6) ** 0.6, found.scores[:, beam], atol=1e-4)


@pytest.mark.slow
def test_an_n_best_list_is_sorted_and_distinct_and_begins_with_the_best():
    """B5: beam 5, n_best 5 and 1."""
    config, params = biased_model(1.0)
    source = rows([[*sentence(n), EOS] for n in (1, 4, 7)], 8)
    search = {"beam_size": 5, "max_extra_length": 6}
    many = searched(config, params, source, n_best=5, **search)
    best = searched(config, params, source, n_best=1, **search)
    for sent in range(3):
        assert len({tuple(tokens) for tokens in many.tokens[sent]}) == 5
    assert (np.diff(many.scores, axis=1) <= 0).all()
    np.testing.assert_array_equal(many.tokens[:, :1], best.tokens)
    np.testing.assert_allclose(many.scores[:, :1], best.scores, atol=1e-6)


def test_a_model_that_never_ends_is_cut_at_the_maximal_length():
    """B6: EOS at -1e9, maximal length 5, n_best 2, 3 sentences; a row of padding has no hypothesis."""
    config, params = biased_model(-1e9)
    source = rows([[*sentence(1, seed), EOS] for seed in range(3)] + [[]], 16)
    found = searched(config, params, source, beam_size=2, n_best=2, max_extra_length=3)
    assert not found.finished.any()
    np.testing.assert_array_equal(found.lengths, [[5, 5]] * 3 + [[0, 0]])
    assert (found.tokens[:3, :, :5] < VOCABULARY).all() and (found.tokens != EOS).all()
    assert np.isfinite(found.scores[:3]).all() and (found.scores[3] == -np.inf).all()


def test_scores_of_pieces_are_log_probabilities_given_those_before():
    """Each entry by hand from the logits; 0 at padding."""
    config = small_config()
    params = random_params(config)
    source, target = rows([[*sentence(3), EOS]], 8), rows([[7, 9, EOS]], 6)
    logits = jax.jit(Transformer(config).apply)({"params": params}, source, rows([[BOS, 7, 9]], 3))[0]
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    found = np.asarray(make_score(config)(params, source, target))[0]
    np.testing.assert_allclose(found, [*log_probs[[0, 1, 2], [7, 9, EOS]], 0, 0, 0], atol=1e-5)


def test_learned_positions_that_the_search_would_pass_are_refused():
    """P2: all three numbers in the message."""
    config = small_config(positions="learned", max_positions=16)
    with pytest.raises(UserError, match=r"max_source_length \(12\).*max_extra_length \(5\).*max_positions \(16\)"):
        make_translate(config, SearchConfig(max_source_length=12, max_extra_length=5))


def test_the_same_configuration_gives_the_same_program():
    """J1: nothing is compiled twice in a process."""
    assert make_translate(small_config(), SearchConfig()) is make_translate(small_config(), SearchConfig())
    assert make_translate(small_config(), SearchConfig()) is not make_translate(small_config(), SearchConfig(n_best=2))
