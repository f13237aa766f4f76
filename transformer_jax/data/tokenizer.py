"""Word pieces: one SentencePiece model for both languages (section 5.1 of the paper), and its text rule.

The rule, the same when a model is trained, used for training text and used for translation:

- Unicode NFC: composed and decomposed accents are the same text. Not NFKC, SentencePiece's default: it would rewrite
  what the Transformer learns to write (full-width punctuation of Chinese to ASCII, the ellipsis to three dots).
- Every white-space character, line separator, zero-width space and NUL is a space; a run of spaces is one; spaces at
  the ends are dropped.
- Invisible characters without meaning are removed: other control characters, soft hyphens, byte order marks,
  direction marks. Kept: zero-width joiner and non-joiner, which change what emoji, Persian and Indic text show.

Everything but NFC and NUL is inside the model file, so that other programs that read it follow it too. A foreign model
keeps its own rule, after NFC and NUL.
"""

import hashlib
import io
import os
import pathlib
import re
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import sentencepiece

from transformer_jax.data.text import is_blank
from transformer_jax.errors import UserError

PAD_ID, EOS_ID, BOS_ID, UNK_ID = 0, 1, 2, 3
"""Ids of the control pieces, whatever model is loaded: a foreign one's pieces are renumbered."""

# Part of a model's bytes, and unigram sums in an order that depends on it: fixed, whatever the machine.
_TRAINING_THREADS = 8
_SEED = 20170612
# Bytes; longer lines are left out of learning. The library's 4192 would drop long paragraphs, or a whole small corpus.
_MAX_SENTENCE_BYTES = 1 << 20

_REMOVED = (
    *(0x00AD, 0x200E, 0x200F, 0xFEFF),  # soft hyphen, direction marks, byte order mark
    *range(0x202A, 0x202F),  # embeddings and overrides of direction
    *range(0x2060, 0x2065),  # word joiner, invisible operators
    *range(0x2066, 0x2070),  # isolates and older direction controls
)
_OTHER_SPACES = (0x200B, 0x2581)  # zero-width space; the letter that SentencePiece writes for a space
_CONTROLS = tuple(code for code in range(0xA0) if unicodedata.category(chr(code)) == "Cc")
_NO_LINE_BREAKS = dict.fromkeys((*_CONTROLS, 0x2028, 0x2029), " ")


class Tokenizer:
    """Sentences to ids and back.

    A SentencePiece model from elsewhere works if it has ids for padding, beginning and end. They are read from the
    model, never assumed; its control pieces then get the ids that this package uses everywhere (PAD 0, EOS 1, BOS 2,
    UNK 3), and its other pieces the ids after them, in their order.
    """

    def __init__(self, model: bytes, name: str = "tokenizer model") -> None:
        """Takes a serialized SentencePiece model; `name` is what messages call it.

        Raises:
            UserError: not a SentencePiece model, or one without pad, eos or bos id.
        """
        self._model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            if not model:  # which the library takes for a model of no pieces
                raise RuntimeError("no bytes")
        except RuntimeError as error:
            raise UserError(f"{name}: not a SentencePiece model; give the .model file that training wrote") from error
        self.size: int = self._processor.get_piece_size()
        """Number of word pieces, control pieces counted (W)."""
        controls = [*(self._require_id(kind, name) for kind in ("pad", "eos", "bos")), self._processor.unk_id()]
        self._theirs = [*controls, *(i for i in range(self.size) if i not in controls)]
        """The model's own id of each of our ids."""
        self._ours = [0] * self.size
        for ours, theirs in enumerate(self._theirs):
            self._ours[theirs] = ours
        self._own_numbering = self._theirs == list(range(self.size))
        self.digest: str = hashlib.sha256(model).hexdigest()
        """SHA-256 of the model, hexadecimal."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Reads a SentencePiece `.model` file.

        Raises:
            UserError: no such file, not a SentencePiece model, or one without pad, eos or bos id.
        """
        try:
            model = pathlib.Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"{path}: tokenizer cannot be read ({error.strerror or error}); check the path") from error
        return cls(model, os.fspath(path))

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        path: str | os.PathLike[str],
        *,
        vocab_size: int,
        model_type: Literal["bpe", "unigram"] = "bpe",
        max_sentences: int = 2_000_000,
    ) -> "Tokenizer":
        """Learns word pieces from sentences of both languages and writes the model to `path`, whole or not at all.

        The same sentences and settings give the same bytes. Characters too rare for a piece of their own (0.05 % of the
        text) are written as bytes, so that no text is unknown.

        Args:
            lines: sentences.
            path: the file to write.
            vocab_size: pieces wanted at most; a small corpus gives fewer, see `size`.
            model_type: SentencePiece algorithm.
            max_sentences: of more sentences a random sample is used, always the same: two million give every common
                word piece, and more take longer.

        Raises:
            UserError: no text, or a vocabulary too small for its characters.
            Exception: whatever iterating over `lines` raises.
        """
        model = _learn(_Sentences(lines), vocab_size, model_type, max_sentences)
        tokenizer = cls(model, os.fspath(path))
        tokenizer.save(path)
        return tokenizer

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model file, whole or not at all; creates the folder.

        Raises:
            UserError: the file cannot be written.
        """
        path = pathlib.Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
                # Not a NamedTemporaryFile: that one is readable by its owner only.
                unfinished = pathlib.Path(folder, path.name)
                with unfinished.open("wb") as file:
                    file.write(self._model)
                    file.flush()
                    os.fsync(file.fileno())
                unfinished.replace(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror or error}); choose another place") from error

    def encode(self, lines: Sequence[str], *, num_threads: int = -1) -> list[list[int]]:
        """Ids of each sentence, EOS at its end; a blank line gives EOS alone. `<s>` and the like in text are text.

        Args:
            lines: the sentences.
            num_threads: threads that share out the sentences; -1: one for each processor.

        Raises:
            UserError: a string with half a surrogate pair, which is no text.
        """
        try:
            ids: list[list[int]] = self._processor.encode(
                [_prepared(line) for line in lines], out_type=int, add_eos=True, num_threads=num_threads
            )
        except (RuntimeError, TypeError):  # by the number of sentences, says the library
            _refuse_surrogates(lines)
            raise
        return ids if self._own_numbering else [[self._ours[i] for i in row] for row in ids]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row of ids; nothing in it ends a line.

        Nothing is cut: rows go in without what follows EOS. Control pieces, and ids that the vocabulary does not have
        (spare rows of an embedding), give nothing. Bytes are joined to characters; an incomplete one is U+FFFD. A line
        break or other control character spelt in bytes is a space. The unknown piece is ' ⁇ ', SentencePiece's sign.
        """
        if not ids:
            return []
        rows = [[self._theirs[i] for i in row if 0 <= i < self.size] for row in ids]
        texts: list[str] = self._processor.decode(rows)
        return [text.translate(_NO_LINE_BREAKS) for text in texts]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The word pieces by name, for people to read: '▁' is a space, `<0x0A>` a byte."""
        return [self._processor.id_to_piece(self._theirs[i]) for i in ids]

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[bytes]]:
        """Pickles as the model's bytes."""
        return Tokenizer, (self._model,)

    def _require_id(self, kind: str, name: str) -> int:
        found: int = getattr(self._processor, f"{kind}_id")()
        if found < 0:
            raise UserError(f"{name}: has no {kind} id; train it again with --{kind}_id set (spm_train), or train ours")
        return found


class _Sentences:
    """What SentencePiece reads: prepared sentences, counted; what goes wrong in reading is kept for the caller."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.count = 0
        self.error: Exception | None = None
        self._lines = lines

    def __iter__(self) -> Iterator[str]:
        try:
            for line in self._lines:
                if not is_blank(line):
                    self.count += 1
                    yield _prepared(line)
        except Exception as error:  # SentencePiece turns any exception into its own RuntimeError
            self.error = error


def _learn(sentences: _Sentences, vocab_size: int, model_type: str, max_sentences: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(_SEED)  # of the sample
    with tempfile.TemporaryDirectory() as folder:
        rule = pathlib.Path(folder, "rule.tsv")
        rule.write_text(_normalization_rule(), encoding="ascii")
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                vocab_size=vocab_size,
                model_type=model_type,
                pad_id=PAD_ID,
                eos_id=EOS_ID,
                bos_id=BOS_ID,
                unk_id=UNK_ID,
                hard_vocab_limit=False,
                byte_fallback=True,
                normalization_rule_tsv=str(rule),
                input_sentence_size=max_sentences,
                shuffle_input_sentence=True,
                max_sentence_length=_MAX_SENTENCE_BYTES,
                num_threads=_TRAINING_THREADS,
                minloglevel=2,
            )
        except RuntimeError as error:
            if sentences.error is None:
                _explain(error, sentences.count, vocab_size)
                raise
    if sentences.error is not None:
        raise sentences.error
    return _without_paths(model.getvalue())


def _explain(error: RuntimeError, count: int, vocab_size: int) -> None:
    """Raises a UserError for the failures that are the user's to mend."""
    if count == 0:
        raise UserError("the training text has only blank lines; check data.train_source") from error
    needed = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
    if needed:
        raise UserError(
            f"data.vocab_size is {vocab_size}, but this text needs at least {needed[1]}: its characters, "
            "256 bytes and 4 control pieces"
        ) from error


def _normalization_rule() -> str:
    """SentencePiece's rule format: hexadecimal code point, tab, replacement."""
    spaces = [c for c in range(1, sys.maxunicode + 1) if chr(c).isspace() and c != 0x20] + list(_OTHER_SPACES)
    removed = [c for c in _CONTROLS if c and not chr(c).isspace()] + list(_REMOVED)
    return "".join([f"{c:X}\t20\n" for c in spaces] + [f"{c:X}\t\n" for c in removed])


def _without_paths(model: bytes) -> bytes:
    """The model without the name of the temporary rule file, which differs from run to run."""
    from sentencepiece import sentencepiece_model_pb2  # needs protobuf; only training does

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]  # made at run time
    proto.normalizer_spec.ClearField("normalization_rule_tsv")
    return bytes(proto.SerializeToString(deterministic=True))


def _prepared(line: str) -> str:
    # NUL ends a key in SentencePiece's rule table, so the rule for it cannot stand there.
    return unicodedata.normalize("NFC", line).replace("\0", " ")


def _refuse_surrogates(lines: Sequence[str]) -> None:
    for number, line in enumerate(lines, start=1):
        if any("\ud800" <= char <= "\udfff" for char in line):
            raise UserError(f"line {number}: holds half a surrogate pair, which is no text; decode it as UTF-8")
