"""The word pieces of a text, learned once: beside the tokenized text lies the model of every vocabulary asked for."""

import hashlib
import logging
import pathlib
import tempfile
from collections.abc import Callable

import sentencepiece

from transformer_jax.config import DataConfig
from transformer_jax.data.parallel_text import ParallelText
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError

_log = logging.getLogger(__name__)

_FORMAT = 1  # part of the key: raise it when the text rule or a setting of the trainer changes

_MANY = 200_000  # sentences that take longer than a person waits without a word


def learn_vocabulary(
    text: ParallelText, config: DataConfig, folder: pathlib.Path, say: Callable[[str], None]
) -> Tokenizer:
    """The tokenizer of data.vocab_size, data.tokenizer_type and data.vocabulary_sentences for a text.

    `folder` keeps the model; the next call with the same text and settings reads it, whatever run it is for.

    Raises:
        UserError: no text, a vocabulary too small for its characters, or a folder that cannot be written.
    """
    settings = (config.vocab_size, config.tokenizer_type, config.vocabulary_sentences, sentencepiece.__version__)
    key = hashlib.sha256(repr((_FORMAT, text.digest(), *settings)).encode("utf-8")).hexdigest()[:24]
    path = folder / f"vocabulary-{key}.model"
    if path.exists():
        try:
            tokenizer = Tokenizer.load(path)
        except UserError as error:
            _log.warning("%s; it is learned anew", error)
        else:
            say(f"tokenizer  {_pieces(tokenizer, config)} learned before from {text.name}")
            return tokenizer
    _require_writable(folder)
    sentences = min(2 * text.check(), config.vocabulary_sentences)
    if sentences > _MANY:
        say(f"learning   {config.vocab_size:,} word pieces from {sentences:,} sentences, which takes minutes")
    tokenizer = Tokenizer.train(
        text.sentences(config.vocabulary_sentences),
        path,
        vocab_size=config.vocab_size,
        model_type=config.tokenizer_type,
        max_sentences=config.vocabulary_sentences,
    )
    say(f"tokenizer  {_pieces(tokenizer, config)} learned from {text.name}")
    if tokenizer.size < config.vocab_size:
        say(f"           the text gives no more: data.vocab_size asked for {config.vocab_size:,}")
    return tokenizer


def _require_writable(folder: pathlib.Path) -> None:
    """Before minutes of learning, not after them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to ({error.strerror or error}); choose another folder") from error


def _pieces(tokenizer: Tokenizer, config: DataConfig) -> str:
    return f"{tokenizer.size:,} word pieces ({config.tokenizer_type})"
