"""How every parameter, and all that is shaped like it, lies on the mesh: its letters, and by them the one table."""

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.errors import UserError
from transformer_jax.ops.sharding import mesh_axes, partition_spec
from transformer_jax.parallel.mesh import AnyMesh

LETTERS = {
    "embedding": "WD", "source_embedding": "WD", "target_embedding": "WD", "output_embedding": "WD",
    "source_positions": "PD", "target_positions": "PD",
    "w_q": "DHK", "w_k": "DHK", "w_v": "DHV", "w_o": "HVD", "b_q": "HK", "b_k": "HK", "b_v": "HV", "b_o": "D",
    "w_1": "DF", "b_1": "F", "w_2": "FD", "b_2": "D",
    "scale": "D", "bias": "D",
}  # fmt: skip
"""Dimensions of each parameter by its last name; layers of a stack have N before them."""
STACKS = ("encoder", "decoder")

Path = tuple[Any, ...]


class _Dimension(NamedTuple):
    letter: str
    size: int
    axes: tuple[str, ...]
    shares: int


def shardings(tree: Any, mesh: AnyMesh) -> Any:
    """A NamedSharding for each leaf of parameters, or of any state that holds trees shaped like them.

    Adam's moments and averages follow their parameter by its path; scalars are whole on every device. So is the
    dimension W where the mesh does not divide it, as vocabularies have any size (`kept_whole` says where).

    Args:
        tree: arrays or, from `jax.eval_shape`, their shapes.
        mesh: as `parallel.mesh.make_mesh` makes it; an abstract one will do.

    Raises:
        ValueError: a leaf that LETTERS does not know, or whose letters lie over one mesh axis; its path is named.
        UserError: a dimension other than W that the mesh does not divide.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: NamedSharding(mesh, _spec(path, leaf, mesh)), tree)


def placed_shapes(tree: Any, mesh: AnyMesh) -> Any:
    """`tree` as `jax.ShapeDtypeStruct`s that carry their `shardings`: what a checkpoint is restored by."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings(tree, mesh),
    )


def kept_whole(tree: Any, mesh: AnyMesh) -> dict[str, str]:
    """Parameters that are not shared out as the table says, by path, with the reason and the mend."""
    notes = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        for letter, size, _, shares in _dimensions(path, leaf, mesh):
            if letter == "W" and size % shares:
                notes[path_name(path)] = (
                    f"{size} word pieces do not divide by mesh.tensor {shares}: it and the logits are whole on each; "
                    f"model.vocab_size {-(-size // shares) * shares} would share them out"
                )
    return notes


def path_name(path: Path) -> str:
    """`encoder/feed_forward/w_1`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _letters(path: Path, leaf: Any) -> str:
    if not leaf.shape:
        return ""
    keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    letters = LETTERS.get(keys[-1], "") if keys else ""
    if any(stack in keys for stack in STACKS):
        letters = f"N{letters}"
    if len(letters) != len(leaf.shape):
        raise ValueError("parallel.rules.LETTERS has no letters for it")
    return letters


def _dimensions(path: Path, leaf: Any, mesh: AnyMesh) -> list[_Dimension]:
    try:
        letters = _letters(path, leaf)
        # Vectors, a thousandth of the parameters, need no message of their own for each use: D is whole in them.
        table = mesh_axes(letters, parameter=len(letters.removeprefix("N")) > 1)
    except ValueError as error:
        raise ValueError(f"{path_name(path)} {tuple(leaf.shape)}: {error}") from error
    return [
        _Dimension(letter, size, axes, math.prod(mesh.shape[axis] for axis in axes))
        for letter, size, axes in zip(letters, leaf.shape, table, strict=True)
    ]


def _spec(path: Path, leaf: Any, mesh: AnyMesh) -> PartitionSpec:
    dimensions = _dimensions(path, leaf, mesh)
    for letter, size, axes, shares in dimensions:
        if size % shares and letter != "W":
            raise UserError(
                f"{path_name(path)} has {size} along {letter}, which mesh.{axes[0]} {shares} does not divide: choose "
                f"a divisor of {size}"
            )
    return partition_spec(() if size % shares else axes for _, size, axes, shares in dimensions)
