"""How a configuration's parameters and optimizer state lie on a mesh, and the bytes that each device holds of them."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from transformer_jax.config import Config, MeshConfig
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class ParameterSharding:
    """One parameter."""

    shape: list[int]
    axes: list[list[str]]
    """Mesh axes that share out each dimension; none: it is whole on every device."""
    bytes_per_device: int
    """Of the parameter alone."""


@dataclass(frozen=True)
class Shardings:
    """The state of training on a mesh."""

    mesh: dict[str, int]
    """Devices along each axis."""
    parameters: dict[str, ParameterSharding]
    parameter_bytes: int
    """On each device."""
    optimizer_bytes: int
    """On each device: Adam's two moments, and the moving average where there is one."""
    notes: dict[str, str]
    """Parameters that are whole on each device where the table of rules would share them out, and why."""

    def lines(self) -> list[str]:
        """A page for people."""
        axes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        total = self.parameter_bytes + self.optimizer_bytes
        rows = [
            (name, " ".join(map(str, each.shape)), _spelled(each.axes), f"{each.bytes_per_device:,}")
            for name, each in self.parameters.items()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            f"Shardings on {math.prod(self.mesh.values())} device(s): {axes}; name, shape, axes, bytes on each device",
            *(
                f"  {name:{widths[0]}}  {shape:{widths[1]}}  {spec:{widths[2]}}  {size:>{widths[3]}}"
                for name, shape, spec, size in rows
            ),
            f"On each device {self.parameter_bytes:,} bytes of parameters and {self.optimizer_bytes:,} of optimizer "
            f"state, {total / 2**30:.3f} GiB together; gradients and activations come on top",
            *(f"{name}: {note}" for name, note in self.notes.items()),
        ]


def _spelled(axes: list[list[str]]) -> str:
    return f"({', '.join('+'.join(each) or '-' for each in axes)})"


def describe_shardings(config: Config, vocab_size: int, devices: int | None) -> Shardings:
    """The shardings of a configuration with an embedding of `vocab_size` rows; nothing is allocated.

    Args:
        config: its mesh may have -1 on an axis.
        vocab_size: rows of the embedding.
        devices: need not be there. None: as many as the mesh asks for, or all of this machine if it has a -1.

    Raises:
        UserError: the devices do not make such a mesh, or the mesh does not divide a parameter.
    """
    import jax
    from jax.sharding import AbstractMesh, AxisType

    from transformer_jax.parallel import rules
    from transformer_jax.parallel.mesh import AXES, mesh_shape
    from transformer_jax.training.state import init_state, make_optimizer

    count = _device_count(config.mesh) if devices is None else devices
    if count < 1:
        raise UserError(f"--devices is {count}, but must be at least 1")
    mesh = AbstractMesh(mesh_shape(config.mesh, count), AXES, axis_types=(AxisType.Auto,) * 3)
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    optimizer = make_optimizer(config.optimizer, model.d_model, config.train.steps)
    state = jax.eval_shape(lambda: init_state(model, optimizer, 0))
    over_data = config.mesh.shard_weight_update
    placed = rules.placed_shapes(state, rules.shardings(state, mesh, over_data=over_data))
    parameters = {
        rules.path_name(path): ParameterSharding(list(leaf.shape), _axes(leaf, mesh), _held_bytes(leaf))
        for path, leaf in jax.tree_util.tree_flatten_with_path(placed.params)[0]
    }
    return Shardings(
        dict(mesh.shape),
        parameters,
        sum(each.bytes_per_device for each in parameters.values()),
        sum(_held_bytes(leaf) for leaf in jax.tree.leaves(placed.optimizer_state)),
        rules.kept_whole(state.params, mesh, over_data=over_data),
    )


def _device_count(mesh: MeshConfig) -> int:
    sizes = (mesh.data, mesh.fsdp, mesh.tensor)
    if -1 not in sizes:
        return math.prod(sizes)
    import jax

    return jax.device_count()


def _axes(leaf: Any, mesh: Any) -> list[list[str]]:
    spec = [*leaf.sharding.spec, *(None,) * (leaf.ndim - len(leaf.sharding.spec))]
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return [[axis for axis in entry if mesh.shape[axis] > 1] for entry in entries]


def _held_bytes(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * int(leaf.dtype.itemsize)
