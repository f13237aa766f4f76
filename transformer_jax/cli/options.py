"""Options of a command from a dataclass with documented fields: help pages by tyro, and mistakes as one sentence."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from transformer_jax.config import Config
from transformer_jax.config_fields import describe_type, field_types, nearest, parse_value
from transformer_jax.config_loading import load_config
from transformer_jax.errors import UserError

Options = TypeVar("Options")

Run = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]

# A command that takes a configuration has a field `settings` of this type, for its help page: that shows every field's
# docstring, and its value in the file that is named beside --help.
ConfigFields = Annotated[tyro.conf.FlagConversionOff[Config], tyro.conf.arg(name="")]

_HELP = {"-h", "--help"}


def parse_options(
    options: type[Options],
    argv: Sequence[str],
    command: str,
    other_names: Iterable[str] = (),
) -> Options:
    """An `options` object from a command line; `--help` prints the help page and exits with 0.

    Beside a configuration (`--config FILE --help`, or `FILE --help`) the page shows that file's values as defaults.

    Args:
        options: a dataclass; fields become `--options`, their docstrings the help.
        argv: the words after the command.
        command: its name, for messages.
        other_names: names that are not options here but may be meant, for the nearest name.

    Raises:
        UserError: an unknown option (with the nearest name), a missing or bad value.
    """
    if _HELP & set(argv):
        page = _with_named_config(options, [word for word in argv if word not in _HELP])
        tyro.cli(page, args=["--help"], prog=f"transformer-jax {command}", config=[tyro.conf.FlagCreatePairsOff])
    values = _given_values(options, argv, command, list(other_names))
    missing = [_shown(options, name) for name in _required(options) if name not in values]
    if missing:
        raise UserError(f"{' and '.join(missing)} must be given (see transformer-jax {command} --help)")
    return options(**values)


def _with_named_config(options: type, argv: Sequence[str]) -> type:
    """`options` with the configuration that `argv` names as the default of `settings`; other mistakes do not matter."""
    if "settings" not in get_type_hints(options):
        return options
    named = _named_config(options, argv)
    if named is None:
        return options
    config = load_config(named)
    settings = ("settings", ConfigFields, dataclasses.field(default_factory=lambda: config))
    return dataclasses.make_dataclass(
        options.__name__, [settings], bases=(options,), namespace={"__doc__": options.__doc__}, frozen=True
    )


def _named_config(options: type, argv: Sequence[str]) -> str | None:
    """The word that is the configuration, whatever the others are."""
    kinds = {_spelled(name): kind for name, kind in field_types(options).items()}
    named = None
    for before, word in zip(["", *argv], argv, strict=False):
        if word.startswith("--config=") or (before == "--config" and not word.startswith("--")):
            named = word.removeprefix("--config=")
        elif "config" in _positional(options) and named is None and not word.startswith("-"):
            named = word if kinds.get(before, bool) is bool else None
    return named


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are options of the command, and those that change fields of the configuration.

    A change is `--section.field VALUE`, `--section.field=VALUE` or `section.field=VALUE`.
    """
    sections = {section.name for section in dataclasses.fields(Config)}
    rest: list[str] = []
    overrides: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        is_field = "." in name and (word.startswith("--") or (equals and name.partition(".")[0] in sections))
        if not is_field:
            rest.append(word)
        elif equals:
            overrides.append(word)
        else:
            overrides.append(word)
            for following in itertools.islice(words, 1):
                # Help is asked for, and no value.
                (rest if following in _HELP else overrides).append(following)
    return rest, overrides


def _given_values(options: type, argv: Sequence[str], command: str, other_names: list[str]) -> dict[str, Any]:
    """The values given, by name. Tyro would parse them too, but its messages are framed, and too long for one line."""
    kinds = {name: kind for name, kind in field_types(options).items() if "." not in name}
    positional = _positional(options)
    values: dict[str, Any] = {}
    words: list[str] = []
    remaining = iter(argv)
    for word in remaining:
        if not word.startswith("-"):
            words.append(word)
            continue
        spelled, equals, text = word.partition("=")
        name = spelled.removeprefix("--").replace("-", "_")
        if name not in kinds or name in positional or not word.startswith("--"):
            known = [_spelled(known) for known in [*kinds, "help", *other_names] if known not in positional]
            raise UserError(f"there is no option {spelled!r}{nearest(_spelled(name), known)}")
        if kinds[name] is not bool:
            values[name] = parse_value(text if equals else _next(remaining, spelled, kinds[name]), kinds[name], spelled)
        elif equals:
            raise UserError(f"{spelled} takes no value; leave {equals + text!r} out")
        else:
            values[name] = True
    for surplus in words[len(positional) :]:
        raise UserError(f"{surplus!r} is one word too many (see transformer-jax {command} --help)")
    values |= dict(zip(positional, words, strict=False))
    for name in (name for name, value in values.items() if value == ""):  # "$RUN" of a shell where it is not set
        raise UserError(f"{_shown(options, name)} is empty; give it a value")
    return values


def _next(words: Iterator[str], option: str, kind: object) -> str:
    text = next(words, "--")
    if text.startswith("--"):
        raise UserError(f"{option} needs a value: {describe_type(kind)}")
    return text


def _shown(options: type, name: str) -> str:
    return name.upper() if name in _positional(options) else _spelled(name)


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def _positional(options: type) -> list[str]:
    hints = get_type_hints(options, include_extras=True)
    return [name for name, hint in hints.items() if tyro.conf.Positional in getattr(hint, "__metadata__", ())]


def _required(options: Any) -> list[str]:
    return [
        option.name
        for option in dataclasses.fields(options)
        if option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING
    ]


def given(options: object, *names: str) -> dict[str, Any]:
    """The named options that were given: those that are not None, as arguments for a call."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}
