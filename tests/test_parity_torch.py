"""The same weights in PyTorch's own Transformer layers (see benchmarks/torch_twin.py): logits, loss, every gradient."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import BOS, PAD, random_params, rows, sentence, small_config

from transformer_jax.data.batches import Batch
from transformer_jax.model.transformer import Transformer
from transformer_jax.ops.loss import loss_sums

torch = pytest.importorskip("torch", reason="PyTorch is not installed (pip install '.[parity]')")

twin = importlib.import_module("torch_twin")  # only now: it imports it

SOURCE = rows([sentence(4), sentence(7)], 8)
TARGET = rows([[BOS, *sentence(5, seed=1)], [BOS, *sentence(2, seed=1)]], 6)
LABELS = rows([[*sentence(5, seed=1), 1], [*sentence(2, seed=1), 1]], 6)
SMOOTHING = 0.1


def torch_batch():
    """The same batch, its padding told by segments."""
    source, target, labels = (torch.tensor(np.asarray(ids)).long() for ids in (SOURCE, TARGET, LABELS))
    positions = [torch.arange(ids.shape[1]).expand(ids.shape) for ids in (source, target)]
    segments = [(ids != PAD).long() for ids in (source, target)]
    return Batch(source, segments[0], positions[0], target, labels, segments[1], positions[1])


def our_loss(config, params):
    logits = Transformer(config).apply({"params": params}, SOURCE, TARGET)
    sums = loss_sums(logits, LABELS, (LABELS != PAD).astype(jnp.float32), SMOOTHING)
    return sums["loss"] / sums["tokens"], logits


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_logits_loss_and_gradients_equal_torchs(norm):
    """Every leaf of the parameter tree; torch shares label smoothing over all W pieces, as we do."""
    config = small_config(d_model=12, num_heads=3, norm=norm)
    params = random_params(config)
    gradient = jax.jit(jax.value_and_grad(functools.partial(our_loss, config), has_aux=True))
    (loss, logits), gradients = gradient(params)

    leaves = jax.tree.map(lambda leaf: torch.tensor(np.asarray(leaf), requires_grad=True), params)
    model, state = twin.TorchTwin(config, 16), twin.twin_state(config, leaves)
    assert state.keys() == model.state_dict().keys()
    batch = torch_batch()
    torch_logits = torch.func.functional_call(model, state, (batch,))
    torch_loss = twin.smoothed_loss(torch_logits, batch.labels, SMOOTHING)
    torch_loss.backward()

    real = np.asarray(TARGET != PAD)
    np.testing.assert_allclose(logits[real], torch_logits.detach().numpy()[real], atol=2e-5)
    assert float(loss) == pytest.approx(torch_loss.item(), rel=1e-5)
    jax.tree_util.tree_map_with_path(
        lambda path, ours, theirs: np.testing.assert_allclose(
            ours, theirs.grad.numpy(), atol=1e-5, err_msg=jax.tree_util.keystr(path)
        ),
        gradients, leaves,
    )  # fmt: skip
