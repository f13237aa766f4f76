"""A table of experiments: each row is a few changed fields of one configuration, beside what a paper prints of it."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformer_jax.config import Config
from transformer_jax.config_fields import field_types, nearest, replace
from transformer_jax.config_loading import choose_variant, run_config_file
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Printed:
    """What the paper prints of a row; None where the cell is blank."""

    perplexity: float
    """Per word piece of the dev set, without label smoothing."""
    bleu: float
    """On the dev set."""
    millions: int | None = None
    """Parameters, in millions."""


@dataclass(frozen=True)
class Row:
    """One experiment."""

    name: str
    """Names the variant of the configuration file and the folder of its runs."""
    changes: Mapping[str, object]
    """Fields by dotted name (`model.num_heads`) with their new values."""
    printed: Printed | None = None
    """The paper's results, where it has them."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.+-]*", self.name):
            raise UserError(f"row {self.name!r}: a row's name is made of letters, digits and . + -; rename it")


def row_config(base: Config, rows: Sequence[Row], name: str) -> Config:
    """`base` with the changes of the row `name`: what `get_config` of a file with ROWS returns.

    Raises:
        UserError: no such row; a field that there is not, or a value that it does not take.
    """
    changes = choose_variant({row.name: row.changes for row in rows}, name)
    kinds = field_types(Config)
    for field in changes:
        if field not in kinds:
            raise UserError(f"row {name}: there is no field {field!r}{nearest(field, kinds)}")
    return replace(base, changes)


def load_rows(path: str | os.PathLike[str]) -> tuple[Row, ...]:
    """ROWS of a configuration file; the first row is the one that the others are compared with.

    Raises:
        UserError: no such file, a file that fails, or one without rows.
    """
    name = os.fspath(path)
    file, _, row = name.rpartition(":")
    if os.path.isfile(file) and not os.path.exists(path):
        raise UserError(f"there is no configuration file {name!r}; write {file} --rows {row} to choose rows of a table")
    rows = getattr(run_config_file(path), "ROWS", None)
    if not isinstance(rows, Sequence) or not rows or not all(isinstance(row, Row) for row in rows):
        raise UserError(
            f"{path}: it has no ROWS, a tuple of transformer_jax.ablation.table.Row; name a table, such as "
            "configs/table3.py"
        )
    names = [row.name.lower() for row in rows]  # folders of these names must differ wherever they lie
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: two rows are named {twice!r}; rename one")
    return tuple(rows)


def choose_rows(rows: Sequence[Row], names: str | None) -> tuple[Row, ...]:
    """The first row and those that `names` lists (`A1,B2`), in the table's order; all where it is None.

    Raises:
        UserError: an unknown name, with the nearest one.
    """
    if names is None:
        return tuple(rows)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {row.name.lower(): row.name for row in rows}
    for name in wanted:
        if name.lower() not in known:
            raise UserError(f"--rows: there is no row {name!r}{nearest(name, known.values())}")
    if not wanted:
        raise UserError(f"--rows names no row; there are: {', '.join(known.values())}")
    chosen = {known[name.lower()] for name in wanted}
    return tuple(row for row in rows if row.name in chosen or row is rows[0])
