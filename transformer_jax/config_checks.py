"""Checks of a configuration's values, each a UserError that names the field."""

from transformer_jax.errors import UserError

# Nothing that is counted here comes near it: a larger number is a slip, and would end in a message about memory.
_LARGEST = 2**26
# Beyond these, float32 has only 0 and infinity.
_TINY, _HUGE = 1e-30, 1e30


def require(condition: bool, name: str, value: object, wanted: str) -> None:
    """The field `name` must be `wanted`."""
    if not condition:
        raise UserError(f"{name} is {value!r}, but must be {wanted}")


def require_positive(prefix: str, config: object, *names: str) -> None:
    """None, or from 1 to a limit that no count here comes near."""
    for name in names:
        value = getattr(config, name)
        require(value is None or 1 <= value <= _LARGEST, f"{prefix}.{name}", value, f"from 1 to {_LARGEST}")


def require_float32(prefix: str, config: object, *names: str) -> None:
    """None, or a number that float32 holds and that is above 0."""
    for name in names:
        value = getattr(config, name)
        wanted = f"from {_TINY} to {_HUGE}, above 0 in float32"
        require(value is None or _TINY <= value <= _HUGE, f"{prefix}.{name}", value, wanted)


def require_fraction(prefix: str, config: object, *names: str) -> None:
    """At least 0 and below 1."""
    for name in names:
        value = getattr(config, name)
        require(0.0 <= value < 1.0, f"{prefix}.{name}", value, "at least 0 and below 1")
