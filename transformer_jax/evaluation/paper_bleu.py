"""The paper's metric (section 6.1, Table 2): BLEU on Moses tokens, German compounds split, as multi-bleu.perl counts.

The steps are those of tensor2tensor's `get_ende_bleu.sh`: punctuation made plain, `tokenizer.perl -l de`, compounds
split, `multi-bleu.perl`. That script takes a reference whose quotation marks were made straight by hand and which was
tokenized before; here both sides are plain text and take the same steps, so neither is tokenized twice.
"""

import importlib.metadata
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sacrebleu.metrics.bleu import BLEU

# Languages that sacremoses names, but whose rules in tokenizer.perl it lacks (colons, middle dots and apostrophes in
# words), or which no spaces part into words.
_UNLIKE_MOSES = frozenset({"ca", "fi", "ga", "sv", "tdt", "yue", "zh"})

# What replace-unicode-punctuation.perl leaves as it is: lower, high-reversed and angle quotation marks.
_QUOTES = str.maketrans(dict.fromkeys("„‟«»", '"') | dict.fromkeys("‚‘‛‹›", "'"))

# Characters other than spaces around a hyphen. A match uses both up, so `a-b-c` is split once, as in the script.
_COMPOUND = re.compile(r"(\S)-(\S)")


@dataclass(frozen=True)
class PaperBleu:
    """The metric's value, in percent, and all that one must know to repeat it, in sacreBLEU's form of a signature."""

    score: float
    signature: str


def paper_bleu(hypotheses: Sequence[str], references: Sequence[str], language: str) -> PaperBleu | None:
    """Corpus BLEU of plain text as the paper counts it; None where Moses has no rules for the language.

    Case-sensitive, up to 4-grams, no smoothing: 0.0 where an n-gram order has no match. Compounds are split in German
    alone; in other languages the tokens are Moses's as they stand (the paper's English-French).

    Args:
        hypotheses: one plain (detokenized) translation a sentence.
        references: one plain reference a sentence, as many.
        language: two-letter code of the target language.
    """
    tokens = paper_tokens(language)
    if tokens is None:
        return None
    bleu = BLEU(tokenize="none", smooth_method="none", force=True)
    score = bleu.corpus_score(list(map(tokens, hypotheses)), [list(map(tokens, references))]).score
    details = f"tok:moses-{language}|quotes:straight|compounds:{'split' if language == 'de' else 'whole'}"
    version = importlib.metadata.version("sacremoses")
    signature = str(bleu.get_signature()).replace("tok:none", details) + f"|sacremoses:{version}"
    return PaperBleu(score, signature)


def paper_tokens(language: str) -> Callable[[str], str] | None:
    """What makes a plain line into the metric's tokens, with a space between; None where Moses has no rules."""
    # Half a second to import, most of it tables of characters.
    from sacremoses import MosesPunctNormalizer, MosesTokenizer
    from sacremoses.corpus import NonbreakingPrefixes

    if language in _UNLIKE_MOSES or language not in NonbreakingPrefixes().available_langs.values():
        return None
    tokenizer, normalizer = MosesTokenizer(language), MosesPunctNormalizer(language)

    def tokens(line: str) -> str:
        plain = normalizer.replace_unicode_punct(line).translate(_QUOTES)
        found: str = tokenizer.tokenize(plain, return_str=True)
        return split_compounds(found) if language == "de" else found

    return tokens


def split_compounds(tokens: str) -> str:
    """`rich-text format` -> `rich ##AT##-##AT## text format`."""
    return _COMPOUND.sub(r"\1 ##AT##-##AT## \2", tokens)
