"""Scores as a page for people; programs take `dataclasses.asdict`."""

from transformer_jax.evaluation.bleu import Scores


def scores_table(scores: Scores, title: str) -> str:
    """A small table: title, BLEU cased and lower-cased, chrF, lengths, and the signatures that make them repeatable."""
    rows = [
        ("BLEU", f"{scores.bleu:.2f}", scores.bleu_signature),
        ("BLEU, lower-cased", f"{scores.bleu_lowercase:.2f}", "as above, case:lc"),
        ("chrF2", f"{scores.chrf:.2f}", scores.chrf_signature),
        (
            "brevity penalty",
            f"{scores.brevity_penalty:.3f}",
            f"{scores.hypothesis_length} tokens for {scores.reference_length} in the reference",
        ),
        ("sentences", str(scores.sentences), ""),
    ]
    return "\n".join([title, *(f"  {name:17}  {value:>6}  {note}".rstrip() for name, value, note in rows)])
