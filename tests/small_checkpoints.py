"""Small states and folders of checkpoints for tests, and ways to damage them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer_jax.checkpointing.checkpoints import Checkpoints, digest_tree


def make_state(step: int = 0, layers: int = 2, pieces: int = 100) -> dict:
    keys = jax.random.split(jax.random.key(step), 2)
    params = {
        "embedding": jax.random.normal(keys[0], (pieces, 4)),
        "encoder": {"w_q": jax.random.normal(keys[1], (layers, 4, 4)), "scale": jnp.ones((4,), jnp.bfloat16)},
    }
    optimizer = optax.adam(1e-3)
    return {"params": params, "optimizer_state": optimizer.init(params), "step": jnp.int32(step)}


def make_tiny_state(step: int = 0) -> dict:
    # 1280 bytes: orbax stores values up to 1024 bytes inside its index, which has a checksum of its own.
    return {"params": {"w": jnp.full((16, 20), step + 0.5)}, "step": jnp.int32(step)}


def abstract(tree):
    return jax.eval_shape(lambda: tree)


def assert_same(tree, expected) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    assert digest_tree(tree) == digest_tree(expected)


class Run:
    """Checkpoints with the warnings they gave."""

    def __init__(self, folder: Path, keep: int = 3, **options):
        self.warnings: list[str] = []
        self.checkpoints = Checkpoints(folder, keep=keep, warn=self.warnings.append, **options)

    def save(self, *steps: int, scores: dict[int, float] | None = None) -> "Run":
        for step in steps:
            self.checkpoints.save(step, make_tiny_state(step), {"at": step}, score=(scores or {}).get(step))
        self.checkpoints.wait()
        return self

    def restore(self, step: int | None = None):
        return self.checkpoints.restore(abstract(make_tiny_state()), step)


def numbered(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.isdigit())


def data_files(step_folder: Path) -> list[Path]:
    return sorted(path for path in step_folder.rglob("*") if path.is_file())


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << (position % 8)
    path.write_bytes(bytes(content))


def flip_value(folder: Path, value: float) -> Path:
    """Changes one bit of the array that holds `value`, in whichever file that is."""
    pattern = np.float32(value).tobytes()
    path = next(path for path in data_files(folder) if pattern in path.read_bytes())
    flip(path, path.read_bytes().index(pattern))
    return path
