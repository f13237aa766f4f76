"""The device mesh, its axes `data`, `fsdp` and `tensor`, and how a batch and sums over it lie on them."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.config import MeshConfig
from transformer_jax.errors import UserError
from transformer_jax.ops.sharding import ROW_AXES

AXES = ("data", "fsdp", "tensor")

AnyMesh = Mesh | AbstractMesh

Sums = TypeVar("Sums")
Result = TypeVar("Result")


def mesh_shape(config: MeshConfig, devices: int) -> tuple[int, int, int]:
    """Devices along each of AXES; -1 takes what the other two leave of `devices`.

    Raises:
        UserError: they are more than `devices`, or do not divide them where one is -1.
    """
    sizes = [config.data, config.fsdp, config.tensor]
    given = math.prod(size for size in sizes if size != -1)
    if -1 in sizes:
        free = AXES[sizes.index(-1)]
        if devices % given:
            others = " x ".join(f"mesh.{axis} {size}" for axis, size in zip(AXES, sizes, strict=True) if axis != free)
            raise UserError(
                f"{others} is {given}, which does not divide the {devices} device(s): choose divisors of {devices}, "
                f"or give mesh.{free} a number"
            )
        sizes[sizes.index(-1)] = devices // given
    elif given > devices:
        asked = " x ".join(f"mesh.{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
        raise UserError(f"{asked} is {given} devices, but there are {devices}: lower one, or give -1 for all left")
    return sizes[0], sizes[1], sizes[2]


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with all three AXES over these devices, the first of them if it needs fewer. None: all there are.

    Raises:
        UserError: as `mesh_shape` does.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(config, len(devices))
    # Auto axes: under Explicit ones, flax's modules need a sharding for each intermediate.
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[: math.prod(shape)])


def all_devices() -> Mesh | None:
    """A mesh that shares out rows over all devices; None where there is one, which needs none."""
    return make_mesh(MeshConfig()) if jax.device_count() > 1 else None


def row_shares(mesh: AnyMesh) -> int:
    """Into how many parts a batch's rows are cut: their number must be a multiple of it."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Axis 0, a batch's rows, shared out over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def on_mesh(function: Callable[..., Result], mesh: Mesh) -> Callable[..., Result]:
    """`function`, traced with `mesh` as its context, so that the model's constraints hold whoever calls it."""

    @functools.wraps(function)
    def traced(*arguments: Any) -> Result:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments)

    return traced


def sum_over_data(function: Callable[[Any, Any], Sums], mesh: Mesh, laid: Any) -> Callable[[Any, Any], Sums]:
    """`function(whole, rows)`, a tree of sums over rows, worked out on each share of `data` and then added up.

    Left to itself XLA adds up every gradient where it arises, in each scanned layer and each part of an accumulated
    batch. So they stay on their devices until the end, and one all-reduce adds all of them, but for those that `laid`
    cuts by `data`: these are reduce-scattered, so that each device has its part of the sum. Where `fsdp` and `tensor`
    are both in use it is left to itself: XLA's partitioner aborts on a look-up in a matrix that is cut over one by rows
    that are cut over the other, inside of `shard_map` over a third axis (jax 0.10.2 and 0.12.0).

    Args:
        function: of `whole`, which every share of `data` has, and of rows, of which each has its own.
        mesh: the mesh.
        laid: NamedShardings of the sums, or a prefix of their tree.
    """
    if mesh.shape["data"] == 1 or min(mesh.shape["fsdp"], mesh.shape["tensor"]) > 1:
        return function
    cut = jax.tree.map(lambda sharding: _along_data(sharding.spec), laid)

    def added(whole: Any, rows: Any) -> Sums:
        sums = function(whole, rows)
        leaves, tree = jax.tree.flatten(sums)
        specs = [tuple(spec) for spec in jax.tree.leaves(jax.tree.broadcast(cut, sums))]
        scattered = {
            i: jax.lax.psum_scatter(leaves[i], "data", scatter_dimension=spec.index("data"), tiled=True)
            for i, spec in enumerate(specs)
            if "data" in spec
        }
        alike = iter(jax.lax.psum([leaf for i, leaf in enumerate(leaves) if i not in scattered], "data"))
        added_up = [scattered[i] if i in scattered else next(alike) for i in range(len(leaves))]
        return cast(Sums, jax.tree.unflatten(tree, added_up))

    return jax.shard_map(
        added,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=cut,
        axis_names={"data"},
        check_vma=False,  # with it on, the gradient of a parameter is added up at each use
    )


def _along_data(spec: PartitionSpec) -> PartitionSpec:
    """What it says of `data`, the only axis that is manual there."""
    return PartitionSpec(*("data" if entry == "data" else None for entry in spec))
