"""Scores of a test set: what is counted, what is refused, and how text is split into tokens."""

import importlib.util

import pytest

from transformer_jax.errors import UserError
from transformer_jax.evaluation.bleu import bleu_tokenizer, corpus_scores
from transformer_jax.evaluation.report import Evaluation

REFERENCES = ["The cat sat on the mat.", "A dog barked at the moon.", "It rained the whole day."]
CHINESE = ("我们今天下午去公园散步吧朋友", "我们今天下午去公园跑步吧朋友")


def test_a_perfect_translation_scores_100():
    scores = corpus_scores(REFERENCES, REFERENCES, "en")
    assert scores.bleu == pytest.approx(100.0)
    assert scores.bleu_lowercase == pytest.approx(100.0)
    assert scores.chrf == pytest.approx(100.0)
    assert scores.brevity_penalty == 1.0
    assert scores.sentences == 3


@pytest.mark.parametrize("hypotheses", [REFERENCES[:2], [*REFERENCES, "more"]])
def test_counts_that_differ_are_refused_with_both(hypotheses):
    """E1: sacreBLEU's own function scores the shorter of the two."""
    with pytest.raises(UserError, match=f"{len(hypotheses)} hypotheses but 3 references"):
        corpus_scores(hypotheses, REFERENCES, "en")


def test_an_empty_hypothesis_counts():
    """E3 (a): its reference stays in the reference length, and the brevity penalty falls."""
    scores = corpus_scores([REFERENCES[0], "", REFERENCES[2]], REFERENCES, "en")
    whole = corpus_scores(REFERENCES, REFERENCES, "en")
    assert scores.reference_length == whole.reference_length
    assert scores.hypothesis_length < whole.hypothesis_length
    assert scores.brevity_penalty < 1.0
    assert 0.0 < scores.bleu < 100.0
    assert scores.sentences == 3


def test_an_empty_reference_is_no_fault():
    """E3 (b)."""
    scores = corpus_scores(REFERENCES, [REFERENCES[0], "", REFERENCES[2]], "en")
    assert 0.0 < scores.bleu < 100.0
    assert scores.sentences == 3


def test_empty_hypotheses_score_zero():
    """E3 (c): early in training."""
    scores = corpus_scores(["", "", ""], REFERENCES, "en")
    assert (scores.bleu, scores.bleu_lowercase, scores.brevity_penalty) == (0.0, 0.0, 0.0)
    assert scores.chrf == pytest.approx(0.0)


@pytest.mark.parametrize("references", [[], ["", " "], ["\u200b"]])
def test_nothing_to_score_is_said(references):
    """E3 (d)."""
    with pytest.raises(UserError, match="nothing to score"):
        corpus_scores([""] * len(references), references, "en")


def test_case_counts_but_for_the_lower_cased_score():
    scores = corpus_scores([line.lower() for line in REFERENCES], REFERENCES, "en")
    assert scores.bleu < 100.0
    assert scores.bleu_lowercase == pytest.approx(100.0)


def test_chinese_is_split_into_characters():
    """E4: sacreBLEU's default tokenisation gives 0.0 here."""
    hypothesis, reference = CHINESE
    chinese = corpus_scores([hypothesis], [reference], "zh")
    assert chinese.bleu > 50.0
    assert "tok:zh" in chinese.bleu_signature
    assert corpus_scores([hypothesis], [reference], "de").bleu == pytest.approx(0.0)


def test_punctuation_is_a_token_of_its_own():
    """E4: `mat .` equals `mat.` after tokenisation."""
    assert corpus_scores(["The cat sat on the mat ."], REFERENCES[:1], "en").bleu == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    [
        ("de", "13a"),
        ("fr", "13a"),
        ("en", "13a"),
        ("zh", "zh"),
        ("zh-TW", "zh"),
        ("ZH_cn", "zh"),
        ("xx", "13a"),
        ("zho", "zh"),
        ("yue", "zh"),
    ],
)
def test_the_target_language_chooses_the_tokenizer(language, tokenizer):
    assert bleu_tokenizer(language) == tokenizer
    assert f"tok:{tokenizer}|" in corpus_scores(REFERENCES, REFERENCES, language).bleu_signature


@pytest.mark.parametrize(("language", "mecab"), [("ja", "ja-mecab"), ("ko", "ko-mecab")])
def test_without_mecab_japanese_and_korean_fall_back_to_characters(monkeypatch, language, mecab):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bleu_tokenizer(language) == "char"
    assert "tok:char|" in corpus_scores(["今日は"], ["今日は"], language).bleu_signature
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert bleu_tokenizer(language) == mecab


def test_signatures_say_how_to_repeat_the_scores():
    scores = corpus_scores(REFERENCES, REFERENCES, "en")
    for part in ("nrefs:1", "case:mixed", "tok:13a", "smooth:exp", "version:"):
        assert part in scores.bleu_signature
    assert "nc:6" in scores.chrf_signature
    table = Evaluation("runs/demo", "office test", "de-en", scores).table()
    assert table.startswith("runs/demo\n")
    for signature in (
        scores.paper_bleu_signature, scores.bleu_signature, scores.bleu_lowercase_signature, scores.chrf_signature
    ):  # fmt: skip
        assert f"  100.00  office test de-en, 3 lines; {signature}\n" in table


def test_rows_of_the_table_have_signatures_of_their_own():
    """tensor2tensor 343, 444: cased, lower-cased, tokenised and plain numbers were compared as if of one kind."""
    scores = corpus_scores(REFERENCES, REFERENCES, "de")
    signatures = {
        scores.paper_bleu_signature, scores.bleu_signature, scores.bleu_lowercase_signature, scores.chrf_signature
    }  # fmt: skip
    assert len(signatures) == 4
    assert "case:lc" in scores.bleu_lowercase_signature and "tok:moses-de" in scores.paper_bleu_signature


def test_a_table_without_the_papers_metric_says_so():
    """Chinese is not split by Moses: no number, rather than a wrong one."""
    scores = corpus_scores([CHINESE[0]], [CHINESE[1]], "zh")
    assert scores.paper_bleu is None and scores.paper_bleu_signature is None
    (row,) = [line for line in Evaluation("x", "y", "en-zh", scores).table().splitlines() if "paper" in line]
    assert row.split()[-5:] == ["line;", "not", "a", "Moses", "language"] or "not a Moses language" in row


@pytest.mark.parametrize(("lines", "noted"), [(2737, True), (3003, False)])
def test_the_filtered_newstest2014_is_told_from_the_whole(lines, noted):
    """E6; mtdata 3, fairseq 145 and 592: 2,737 and 3,003 lines, 25.7 against 22.8 BLEU on one model."""
    text = ["a b c d"] * lines
    table = Evaluation("x", "newstest2014", "en-de", corpus_scores(text, text, "de")).table()
    assert ("filtered" in table) is noted
    assert f"{lines:,} lines" in table
