"""What is known of the WMT14 text beforehand: how long its test set is, and which files it is made of."""

import collections
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from transformer_jax.data.parallel_text import ParallelText
from transformer_jax.data.text import read_lines
from transformer_jax.errors import UserError

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


def fault_in_files(builder: Any, extracted: pathlib.Path) -> str | None:
    """What is wrong with the first faulty file of a WMT builder, among those extracted: SGML in which the library finds
    no sentence, or text that is not UTF-8."""
    from tensorflow_datasets.translate import wmt

    if not isinstance(builder, wmt.WmtTranslate):
        return None
    source, _ = builder.builder_config.language_pair
    names = {name for subsets in builder.subsets.values() for name in subsets}
    paths = [path for name in sorted(names) for path in wmt.DATASET_MAP[name].get_path(source)]
    for file in (file for path in paths for file in sorted(extracted.glob(f"*/{path}"))):
        if file.suffix == ".sgm" and not _SEGMENT.search(file.read_bytes()):
            return f'{file} has no line <seg id="1">...</seg>'
        try:
            collections.deque(read_lines(file), maxlen=0)
        except UserError as error:
            return str(error).partition(";")[0]
    return None
