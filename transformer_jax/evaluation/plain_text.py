"""Whether text is plain: what has been done to it before scoring is the commonest cause of wrong BLEU."""

import re
import unicodedata
from collections.abc import Iterable, Sequence

# Marks that plain text does not have. One line with such a mark is enough.
_MARKS = {
    re.compile("▁"): "SentencePiece's mark of a space; join the pieces first",
    re.compile(r"@@(?= |$)"): "the mark of subword-nmt's pieces; join them first (sed 's/@@ //g')",
    re.compile(r" @-@ |##AT##-##AT##"): "the mark of a split hyphen; score the text from before it was split",
    re.compile(r"&(?:quot|apos|amp|lt|gt|nbsp|#\d+|#x[0-9a-fA-F]+);"): (
        "escaped characters, by Moses or from SGML or HTML; unescape them"
    ),
    re.compile(r"</?(?:seg|doc|refset|tstset|srcset)\b[^>]*>"): "SGML; take the text of its segments alone",
}
# White space before a full stop, at the end of a line.
_TOKENIZED = re.compile(r"\s[.?!]$")
_SHARE = 0.1


def signs_of_processing(lines: Sequence[str]) -> list[str]:
    """A sentence for each sign that lines were tokenized, escaped, cut into pieces or left in SGML; [] for plain text.

    Scores of such text are wrong for every metric here, as each does its own tokenisation.
    """
    signs = [
        f"{count:,} of {len(lines):,} lines hold {meaning}"
        for mark, meaning in _MARKS.items()
        if (count := _count(bool(mark.search(line)) for line in lines))
    ]
    tokenized = _count(bool(_TOKENIZED.search(line.rstrip())) for line in lines)
    if tokenized > _SHARE * len(lines):
        signs.append(
            f"{tokenized:,} of {len(lines):,} lines have a space before their last mark: detokenize them first"
        )
    decomposed = _count(not unicodedata.is_normalized("NFC", line) for line in lines)
    if decomposed:
        signs.append(f"{decomposed:,} of {len(lines):,} lines are not in Unicode NFC, and match nothing that is")
    return signs


def _count(values: Iterable[bool]) -> int:
    return sum(values)
