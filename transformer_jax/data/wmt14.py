"""What is known of the WMT14 text beforehand: how long its test set is, and which files it is made of."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from transformer_jax.data.parallel_text import ParallelText

TEST_SENTENCES = 3_003
"""Pairs of newstest2014 for German, French, Czech and Russian; a filtered copy of 2,737 is in use too."""

_LANGUAGES = {"de", "fr", "cs", "ru"}
_SEGMENT = re.compile(rb'^<seg id="\d+">.*</seg>', re.MULTILINE)


def test_set_notes(name: str, splits: Mapping[str, ParallelText], languages: set[str]) -> tuple[str, ...]:
    """A sentence for the user where the test text of `name` is not the newstest2014 that others report on."""
    if not name.startswith("wmt14_translate") or "test" not in splits or not languages & _LANGUAGES:
        return ()
    count = splits["test"].check()
    if count == TEST_SENTENCES:
        return ()
    return (
        f"{splits['test'].name} has {count:,} sentences where newstest2014 has {TEST_SENTENCES:,}: "
        "scores on it cannot be compared with the paper's",
    )


def files_without_segments(builder: Any, extracted: pathlib.Path) -> list[pathlib.Path]:
    """The SGML files of a WMT builder, among those extracted, in which the library finds no sentence."""
    from tensorflow_datasets.translate import wmt

    if not isinstance(builder, wmt.WmtTranslate):
        return []
    source, _ = builder.builder_config.language_pair
    names = {name for subsets in builder.subsets.values() for name in subsets}
    paths = [path for name in sorted(names) for path in wmt.DATASET_MAP[name].get_path(source) if path.endswith(".sgm")]
    found = [file for path in paths for file in sorted(extracted.glob(f"*/{path}"))]
    return [file for file in found if not _SEGMENT.search(file.read_bytes())]
