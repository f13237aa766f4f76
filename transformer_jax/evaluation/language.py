"""Language codes, as people write them."""

import re

from transformer_jax.errors import UserError

# ISO 639-2 and 639-3 for languages whose tokenisation differs from the others', or that the paper has; Mandarin and
# Cantonese are written in Chinese characters.
_SHORTER = {
    "chi": "zh", "zho": "zh", "cmn": "zh", "yue": "zh", "jpn": "ja", "kor": "ko", "deu": "de", "ger": "de",
    "fra": "fr", "fre": "fr", "eng": "en",
}  # fmt: skip


def language_of(code: str) -> str:
    """The language of a code that may have three letters, or name a country or a script too: `zho`, `pt_BR`."""
    first = code.lower().replace("_", "-").partition("-")[0]
    return _SHORTER.get(first, first)


def require_code(code: str, option: str) -> None:
    """Refuses what is no language code, `german` for one: another tokenisation would be taken for it without a word.

    Raises:
        UserError: names the option.
    """
    if not re.fullmatch(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*", code):
        raise UserError(f"{option} is {code!r}, but must be a language code such as de, fr, zh or pt_BR")
