"""A configuration from outside: a Python file with `get_config`, a run's config.json, and overrides on top."""

import contextlib
import difflib
import importlib.util
import os
import pathlib
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from transformer_jax.config import Config
from transformer_jax.config_fields import field_types, nearest, parse_value, replace
from transformer_jax.errors import UserError

T = TypeVar("T")


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration that a file gives, with overrides on top.

    Args:
        path: `configs/table3.py:B1` (a Python file with `get_config(variant: str) -> Config`; the variant is what
            follows the colon, "" where there is none), a `.json` file, or a run's folder (its config.json).
        overrides: `model.num_heads=16`, `--model.num-heads=16`, or `--model.num-heads` and `16` as two items. `None`
            empties an optional field, `true` and `false` set a switch.

    Raises:
        UserError: no such file, variant or field; a value of the wrong type or out of range; a file that fails.
    """
    file, variant = _split_variant(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        raise UserError(f"there is no configuration file {str(file)!r}, nor a run's folder of that name")
    if file.suffix == ".json":
        if variant:
            raise UserError(f"{path}: a JSON configuration has no variants; leave out {':' + variant!r}")
        config = Config.from_json(_read(file), str(file))
    else:
        config = _config_of_file(file, variant)
    return override(config, overrides)


def choose_variant(variants: Mapping[str, T], variant: str) -> T:
    """The entry of `variants` for the name after the colon: what a configuration file's `get_config` returns.

    Raises:
        UserError: an unknown variant; lists those there are.
    """
    if variant in variants:
        return variants[variant]
    names = [name for name in variants if name]
    listed = f"the variants are: {', '.join(names)}" if names else "this file has no variants"
    if not variant:
        raise UserError(f"a variant must be named after a colon; {listed}")
    folded = {name.lower(): name for name in names}
    close = [folded[name] for name in difflib.get_close_matches(variant.lower(), folded, n=1)]
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    raise UserError(f"there is no variant {variant!r}{hint} {listed}")


def override(config: Config, overrides: Sequence[str]) -> Config:
    """`config` with fields changed, in any of the spellings that `load_config` takes. All are applied at once.

    Raises:
        UserError: names the field, and the nearest name or the type wanted.
    """
    if isinstance(overrides, str | Mapping):
        raise UserError(f"overrides are of the type {type(overrides).__name__}; give a list: ['model.num_heads=16']")
    kinds = field_types(Config)
    changes = {}
    for spelled, text in _pairs(overrides):
        name = spelled.removeprefix("--").replace("-", "_")
        if name not in kinds:
            raise UserError(f"there is no field {name!r}{nearest(name, kinds)}")
        changes[name] = parse_value(text, kinds[name], name)
    return replace(config, changes)


def _pairs(overrides: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    items = iter(overrides)
    for item in items:
        name, equals, text = item.partition("=")
        if not equals:
            if not item.startswith("--"):
                raise UserError(f"{item!r} is no override; write section.field=value, such as model.num_heads=16")
            text = next(items, "--")
            if text.startswith("--"):
                raise UserError(f"{name} needs a value")
        pairs.append((name, text))
    return pairs


def _split_variant(path: str) -> tuple[pathlib.Path, str]:
    """The last colon starts the variant, unless a file of the whole name is there (C:\\runs, a colon in a name)."""
    name, colon, variant = path.rpartition(":")
    if not colon or pathlib.Path(path).exists() or "/" in variant or "\\" in variant:
        return pathlib.Path(path), ""
    return pathlib.Path(name), variant


def _read(file: pathlib.Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error


def run_config_file(path: str | os.PathLike[str]) -> types.ModuleType:
    """The module that a Python configuration file is.

    Raises:
        UserError: no such file, no Python, or a file that fails (names the line).
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise UserError(f"there is no configuration file {str(file)!r}")
    with _blamed_on(file):
        return _run_file(file)


def _config_of_file(file: pathlib.Path, variant: str) -> Config:
    with _blamed_on(file):
        get_config = getattr(_run_file(file), "get_config", None)
        if not callable(get_config):
            raise UserError("it has no function get_config(variant) that returns a Config")
        config = get_config(variant)
        if not isinstance(config, Config):
            raise UserError(f"get_config({variant!r}) returned {type(config).__name__}, but must return a Config")
        return config


@contextlib.contextmanager
def _blamed_on(file: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except SystemExit as error:
        raise UserError(f"{file}{_line_in(file, error)}: it ends the program; take that out") from error
    except Exception as error:  # whatever the user's own code raises is the user's to mend
        raise UserError(f"{file}{_line_in(file, error)}: {type(error).__name__}: {error}") from error


def _run_file(file: pathlib.Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"_transformer_jax_config_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError("it is neither a Python file (.py) nor JSON (.json)")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _line_in(file: pathlib.Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}" if error.lineno else ""
    frames = traceback.extract_tb(error.__traceback__)  # which has absolute names
    lines = [frame.lineno for frame in frames if frame.filename == os.path.abspath(file)]
    return f", line {lines[-1]}" if lines else ""
