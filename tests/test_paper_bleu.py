"""The paper's metric, step by step: what becomes of the text, what is counted, and what is not scored at all."""

import math
import pathlib
import subprocess
import sys

import pytest

from transformer_jax.evaluation.bleu import corpus_scores
from transformer_jax.evaluation.paper_bleu import paper_bleu, paper_tokens, split_compounds
from transformer_jax.evaluation.perplexity import perplexity
from transformer_jax.evaluation.plain_text import signs_of_processing

# What tokenizer.perl of 2017 (before a sentence's last abbreviation lost its full stop) gives with -l de, after
# replace-unicode-punctuation.perl and with the quotation marks that the reference of newstest2014 has.
GERMAN = {
    "„Ja“, sagte er.": "&quot; Ja &quot; , sagte er .",
    "»Ja«, ‚nein‘ und “ja”.": "&quot; Ja &quot; , &apos; nein &apos; und &quot; ja &quot; .",
    'Das "Wort".': "Das &quot; Wort &quot; .",
    "Das geht’s an.": "Das geht &apos; s an .",
    "Berlin – heute — morgen": "Berlin – heute — morgen",
    "1–2 und a - b": "1 – 2 und a - b",
    "Die E-Mail-Adresse": "Die E ##AT##-##AT## Mail ##AT##-##AT## Adresse",
    "a-b-c": "a ##AT##-##AT## b-c",
    "-5 Grad und Hin- und Rückweg": "-5 Grad und Hin- und Rückweg",
    "AT&T <b>[x]|y</b>": "AT &amp; T &lt; b &gt; &#91; x &#93; &#124; y &lt; / b &gt;",
    "&quot;": "&amp; quot ;",
    "1.000,50 Euro, 3,14 und 10%": "1.000,50 Euro , 3,14 und 10 %",
    "im Jahr 1999, 2000,": "im Jahr 1999 , 2000 ,",
    "Dr. Müller kam z.B. am 3. Oktober.": "Dr. Müller kam z.B. am 3. Oktober .",
    "Nr. 5 gilt. No. 5 auch, No. Fünf nicht.": "Nr. 5 gilt . No. 5 auch , No. Fünf nicht .",
    "Äpfel, Birnen usw.": "Äpfel , Birnen usw.",
    "Warten ... bitte… nun.": "Warten ... bitte ... nun .",
    "So?! Ja!": "So ? ! Ja !",
    "a,b,c": "a , b , c",
    "  zwei  Leerzeichen\u00a0hier\t ": "zwei Leerzeichen hier",
    "": "",
    " ": "",
}


@pytest.mark.parametrize(("line", "tokens"), GERMAN.items())
def test_german_tokens(line, tokens):
    assert paper_tokens("de")(line) == tokens


@pytest.mark.parametrize(
    ("language", "line", "tokens"),
    [
        ("fr", "L’eau d'aujourd'hui, c'est-à-dire «rien».",
         "L&apos; eau d&apos; aujourd&apos; hui , c&apos; est-à-dire &quot; rien &quot; ."),
        ("en", "It's a well-known fact, isn't it?", "It &apos;s a well-known fact , isn &apos;t it ?"),
        ("en", "See No. 5. No. Five is there.", "See No. 5 . No . Five is there ."),
    ],
)  # fmt: skip
def test_other_languages_have_their_own_apostrophes_and_whole_compounds(language, line, tokens):
    """fairseq 2009: English-French is not scored with compounds split."""
    assert paper_tokens(language)(line) == tokens
    assert "compounds:whole" in paper_bleu([line], [line], language).signature


@pytest.mark.parametrize("language", ["zh", "ja", "ko", "fi", "ca", "xx"])
def test_languages_that_moses_does_not_know_are_not_scored(language):
    assert paper_tokens(language) is None
    assert paper_bleu(["a"], ["a"], language) is None


def test_a_country_in_the_code_is_no_other_language():
    text = ["Die E-Mail-Adresse ist da."]
    assert "tok:moses-de|" in corpus_scores(text, text, "de_AT").paper_bleu_signature


def test_compounds_are_split_as_perls_substitution_does():
    """`perl -ple 's{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g'`: non-overlapping, from the left."""
    assert split_compounds("rich-text format") == "rich ##AT##-##AT## text format"
    split = split_compounds("aa-bb-cc a-b-c-d -x y- --- a--b")
    assert split.replace(" ##AT##-##AT## ", "|") == "aa|bb|cc a|b-c|d -x y- -|- a|-b"


def multi_bleu(hypotheses, references):
    """multi-bleu.perl's formula in loops, on lines of tokens; one reference."""
    correct, total = [0] * 4, [0] * 4
    length = reference_length = 0
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        words, wanted = hypothesis.split(), reference.split()
        length += len(words)
        reference_length += len(wanted)
        for n in range(1, 5):
            available = [tuple(wanted[i : i + n]) for i in range(len(wanted) - n + 1)]
            for i in range(len(words) - n + 1):
                total[n - 1] += 1
                ngram = tuple(words[i : i + n])
                if ngram in available:
                    available.remove(ngram)
                    correct[n - 1] += 1
    if 0 in correct:
        return 0.0
    precision = math.exp(sum(math.log(c / t) for c, t in zip(correct, total, strict=True)) / 4)
    return 100 * precision * min(1.0, math.exp(1 - reference_length / length))


PAIRS = [
    ("Die E-Mail-Adresse von „Dr. Müller“ ist neu.", 'Die E-Mail-Adresse von "Dr. Müller" ist seit heute neu.'),
    ("Sie zahlt 3.000,50 Euro am 3. Oktober.", "Sie zahlt am 3. Oktober 3.000,50 Euro."),
    ("", "Ein leerer Satz zählt auch."),
    ("Das Öl-Gas-Gemisch brennt.", "Das Öl-Gas-Gemisch brennt!"),
    ("Etwas zu viel.", ""),
]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_counts_equal_multi_bleus_formula(count):
    """Empty hypotheses (E3) and empty references among them; the brevity penalty is below 1 in one and 1 in another."""
    hypotheses, references = ([pair[side] for pair in PAIRS[:count]] for side in (0, 1))
    tokens = paper_tokens("de")
    expected = multi_bleu([tokens(line) for line in hypotheses], [tokens(line) for line in references])
    assert 0.0 < expected < 100.0
    assert paper_bleu(hypotheses, references, "de").score == pytest.approx(expected, rel=1e-12)


def test_a_fixed_value():
    """By hand: 8 tokens (`Das ist ein Test ##AT##-##AT## Satz hier .`) against 9; 8 of 8, 6 of 7, 4 of 6, 3 of 5."""
    found = paper_bleu(["Das ist ein Test-Satz hier."], ["Das ist ein Test-Satz heute hier."], "de").score
    by_hand = 100 * math.exp(1 - 9 / 8) * (1 * 6 / 7 * 4 / 6 * 3 / 5) ** 0.25
    assert found == pytest.approx(by_hand, rel=1e-12)


def test_no_smoothing():
    """A short text without a 4-gram in common scores 0, where sacreBLEU's default gives it something."""
    scores = corpus_scores(["Das Haus ist alt."], ["Das Haus war alt."], "de")
    assert scores.paper_bleu == 0.0 < scores.bleu


def test_case_counts():
    assert corpus_scores(["das haus ist alt."], ["Das Haus ist alt."], "de").paper_bleu < 100.0


def test_the_reference_is_tokenized_once_and_its_quotes_are_made_straight():
    """tensor2tensor 317: `„` in the reference, or entities escaped twice, cost a BLEU point and more."""
    assert paper_bleu(['Er sagte "ja" & ging.'], ["Er sagte „ja“ & ging."], "de").score == pytest.approx(100.0)


def test_splitting_compounds_raises_the_score():
    """fairseq 435: 29.3 with, 28.6 without, on one output."""
    scores = corpus_scores(["Die E-Mail-Adresse fehlt hier"], ["Die E-Mail-Adresse ist hier"], "de")
    assert scores.paper_bleu > scores.bleu


@pytest.mark.parametrize(
    ("line", "sign"),
    [
        ("▁Das ▁Haus", "SentencePiece"),
        ("Das Ha@@ us", "subword-nmt"),
        ("ein E @-@ Mail", "split hyphen"),
        ("E ##AT##-##AT## Mail", "split hyphen"),
        ("Er sagte &quot; ja &quot;", "escaped"),
        ("Das geht&#39;s an", "escaped"),
        ("10&#xA0;000 Euro", "escaped"),
        ('<seg id="1">Ja.</seg>', "SGML"),
        ("Das Haus ist alt .", "detokenize"),
        ("Das Ha\u0308uschen.", "NFC"),
    ],
)
def test_text_that_is_not_plain_is_told(line, sign):
    """E4; tensor2tensor 61, 317 and 1542, deep-shallow 3: tokens, pieces or SGML taken for plain text."""
    (found,) = signs_of_processing([line])
    assert sign in found and "1 of 1 lines" in found


def test_plain_text_is_not_suspected():
    plain = [line for line in GERMAN if line != "&quot;"]
    assert signs_of_processing([*plain, "x@@example.org", "AT&T; Wie?", "<b>fett</b>"]) == []
    assert signs_of_processing(["Ein Satz."] * 9 + ["Noch einer ."]) == []


def test_perplexity_per_piece_word_and_character():
    """Table 3's is per word piece; a sentence's end counts as one of each."""
    found = perplexity(nats=12.0, pieces=6, references=["ab cd", "e"], target_language="de")
    assert found.per_piece == pytest.approx(math.exp(2.0))
    assert (found.words, found.per_word) == (5, pytest.approx(math.exp(2.4)))
    assert (found.characters, found.per_character) == (8, pytest.approx(math.exp(1.5)))
    chinese = perplexity(nats=12.0, pieces=6, references=["你好"], target_language="zh-TW")
    assert chinese.words is None and chinese.per_word is None


def test_sacremoses_is_imported_only_when_it_is_needed():
    code = "import sys, transformer_jax.evaluation.bleu; sys.exit('sacremoses' in sys.modules)"
    root = pathlib.Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
