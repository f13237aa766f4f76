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


def shardings(tree: Any, mesh: AnyMesh, *, over_data: bool = False) -> Any:
    """A NamedSharding for each leaf of parameters, or of any state that holds trees shaped like them.

    Adam's moments and averages follow their parameter by its path; scalars are whole on every device. So is the
    dimension W where the mesh does not divide it, as vocabularies have any size (`kept_whole` says where).

    Args:
        tree: arrays or, from `jax.eval_shape`, their shapes.
        mesh: as `parallel.mesh.make_mesh` makes it; an abstract one will do.
        over_data: cuts each matrix by `data` too, along its first dimension that no other axis cuts and that `data`
            divides: what the weight update is shared out by. Vectors stay as they are.

    Raises:
        ValueError: a leaf that LETTERS does not know, or whose letters lie over one mesh axis; its path is named.
        UserError: a dimension other than W that the mesh does not divide.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, _spec(path, leaf, mesh, over_data)), tree
    )


def placed_shapes(tree: Any, laid: Any) -> Any:
    """`tree` as `jax.ShapeDtypeStruct`s that carry the shardings `laid`: what a checkpoint is restored by."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, laid
    )


def kept_whole(tree: Any, mesh: AnyMesh, *, over_data: bool = False) -> dict[str, str]:
    """Parameters that are not shared out as the table says, by path, with the reason and the mend.

    With `over_data`, matrices whose update is not shared out too; where there is nothing to share it over, the field.
    """
    devices = mesh.shape["data"]
    notes: dict[str, list[str]] = {}
    if over_data and devices == 1:
        notes["mesh.shard_weight_update"] = ["mesh.data is 1, so each device updates all that it holds"]
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        dimensions, name = _dimensions(path, leaf, mesh), path_name(path)
        for letter, size, _, shares in dimensions:
            if letter == "W" and size % shares:
                notes.setdefault(name, []).append(
                    f"{size} word pieces do not divide by mesh.tensor {shares}: it and the logits are whole on each; "
                    f"model.vocab_size {-(-size // shares) * shares} would share them out"
                )
        if over_data and devices > 1 and _is_matrix(dimensions) and _cut_by_data(dimensions, devices) is None:
            notes.setdefault(name, []).append(
                f"mesh.data {devices} divides no dimension that no other axis cuts: its update is not shared out"
            )
    return {name: "; ".join(found) for name, found in notes.items()}


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


def _is_matrix(dimensions: list[_Dimension]) -> bool:
    """Whether it has D and another dimension; b_q has two as well, [H K], and is a vector."""
    letters = {each.letter for each in dimensions} - {"N"}
    return "D" in letters and len(letters) > 1


def _cut_by_data(dimensions: list[_Dimension], devices: int) -> int | None:
    """The place of the dimension that `data` is to cut. The first, as the parts of an outer dimension lie in one piece
    each."""
    free = (i for i, (_, size, _, shares) in enumerate(dimensions) if shares == 1 or size % shares)
    return next((i for i in free if dimensions[i].size % devices == 0), None)


def _spec(path: Path, leaf: Any, mesh: AnyMesh, over_data: bool) -> PartitionSpec:
    dimensions = _dimensions(path, leaf, mesh)
    for letter, size, axes, shares in dimensions:
        if size % shares and letter != "W":
            raise UserError(
                f"{path_name(path)} has {size} along {letter}, which mesh.{axes[0]} {shares} does not divide: choose "
                f"a divisor of {size}"
            )
    entries = [() if size % shares else axes for _, size, axes, shares in dimensions]
    devices = mesh.shape["data"]
    if over_data and devices > 1 and _is_matrix(dimensions):
        place = _cut_by_data(dimensions, devices)
        if place is not None:
            entries[place] = ("data",)
    return partition_spec(entries)
