"""The fields of nested dataclasses by dotted name (`model.num_heads`): values checked against types, nearest names.

Values come from two sides: JSON (already typed) and the command line (text). Both end in the same checks.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from transformer_jax.errors import UserError

T = TypeVar("T")

_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "None"}
_NONE_WORDS = ("none", "null")
_BOOL_WORDS = {"true": True, "false": False}


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: `; did you mean 'x'?`, or the names there are where none is near."""
    known = list(names)
    section, dot, _ = name.rpartition(".")
    last = _last(name)
    # A field without its section, or in the wrong one, comes before any name that only looks alike.
    close = [other for other in known if _last(other) == last]
    if not close and dot:
        known = [other for other in known if other.startswith(section + dot)] or known
    if not close:
        endings = {_last(other).lower(): other for other in known}
        close = [endings[ending] for ending in difflib.get_close_matches(last.lower(), endings, n=1)]
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    sections = dict.fromkeys(other.partition(".")[0] for other in known)
    shown = (
        [f"{other}.*" for other in sections] if len(sections) > 1 and any("." in other for other in known) else known
    )
    return f"; there are: {', '.join(shown)}" if known else ""


def field_types(cls: type) -> dict[str, Any]:
    """Every leaf field of a dataclass and of the dataclasses in it: dotted name -> type."""
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            found |= {
                f"{name}.{inner}": inner_kind for inner, inner_kind in field_types(typing.cast(type, kind)).items()
            }
        else:
            found[name] = kind
    return found


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """A dataclass from a nested mapping, strictly: unknown names and wrong types are refused, absent fields default.

    Raises:
        UserError: names the field (with `prefix` before it) and the nearest name or the type wanted.
    """
    kinds = typing.get_type_hints(cls)
    arguments = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if name not in kinds:
            raise UserError(f"there is no field {path!r}{nearest(path, [prefix + known for known in kinds])}")
        if not dataclasses.is_dataclass(kinds[name]):
            arguments[name] = check_value(value, kinds[name], path)
        elif isinstance(value, Mapping):
            arguments[name] = build(typing.cast(type, kinds[name]), value, f"{path}.")
        else:
            raise UserError(f"{path} is {value!r}, but must be an object with the fields of that section")
    return cls(**arguments)


def replace(config: T, changes: Mapping[str, Any]) -> T:
    """`config` with the fields named by dotted name changed, all at once: fields that constrain one another may move
    together. Names and values must have been checked (`field_types`, `parse_value`)."""
    arguments: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        name, dot, inner = path.partition(".")
        if dot:
            sections.setdefault(name, {})[inner] = value
        else:
            arguments[name] = value
    arguments |= {name: replace(getattr(config, name), inner) for name, inner in sections.items()}
    return dataclasses.replace(typing.cast(Any, config), **arguments)


def check_value(value: Any, kind: Any, name: str) -> Any:
    """`value` as `kind` (int, float, bool, str, a Literal or a union of these); whole numbers serve as floats.

    Raises:
        UserError: names the field, the value and the type wanted.
    """
    for choice in _choices(kind):
        if typing.get_origin(choice) is Literal:
            if value in typing.get_args(choice):
                return value
        elif choice is float and type(value) in (int, float) and math.isfinite(value):
            return float(value)
        elif choice is not float and type(value) is choice:  # `type is`, since True is an instance of int
            return value
    raise UserError(f"{name} is {value!r}, but must be {describe_type(kind)}")


def check_types(config: object, prefix: str) -> None:
    """Every field of a dataclass against its type, which Python itself does not do.

    Raises:
        UserError: names the field (with `prefix` before it), the value and the type wanted.
    """
    for name, kind in typing.get_type_hints(type(config)).items():
        check_value(getattr(config, name), kind, prefix + name)


def parse_value(text: str, kind: Any, name: str) -> Any:
    """The value that `text` from the command line stands for; `None` for optional fields, `true` / `false` for bools.

    Raises:
        UserError: names the field, the text and the type wanted.
    """
    choices = _choices(kind)
    readings: list[Any] = []
    if types.NoneType in choices and text.lower() in _NONE_WORDS:
        return None
    for choice in choices:
        try:
            if choice in (int, float):
                readings.append(choice(text))
            elif choice is bool:
                readings.append(_BOOL_WORDS[text.lower()])
            else:
                readings.append(text)
        except (ValueError, KeyError):
            continue  # this reading is not possible; check_value below refuses the text when no reading is
    return check_value(readings[0] if readings else text, kind, name)


def describe_type(kind: Any) -> str:
    """A type in words: `a whole number or None`, `'post' or 'pre'`."""
    words = []
    for choice in _choices(kind):
        if typing.get_origin(choice) is Literal:
            words += [repr(value) for value in typing.get_args(choice)]
        else:
            words.append(_TYPE_WORDS.get(choice) or f"a {choice.__name__}")
    return " or ".join(words)


def _choices(kind: Any) -> tuple[Any, ...]:
    # `Literal[...] | None` is a typing.Union before Python 3.14, other unions are a types.UnionType.
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _last(name: str) -> str:
    """The name without its section, and without the dashes of a command line's option."""
    return name.rpartition(".")[2].lstrip("-")
