"""The paper in numpy, float64, with loops: slow and obvious, the oracle of the tests.

Sections are those of "Attention Is All You Need". One sentence at a time, no masks but lists of what may be seen, and
the parameter tree of `transformer_jax.Transformer`, of which `layer_of` cuts one layer.
"""

import math

import numpy as np


def attention(q, k, v, visible):
    """Equation 1 for one head: q [T K], k [S K], v [S V] -> [T V]; visible[t] lists the keys that query t may see."""
    out = np.zeros((len(q), v.shape[1]))
    for t, keys in enumerate(visible):
        if not keys:
            continue
        scores = np.array([q[t] @ k[s] / math.sqrt(k.shape[1]) for s in keys])
        weights = np.exp(scores - scores.max())
        weights = weights / weights.sum()
        for weight, s in zip(weights, keys, strict=True):
            out[t] += weight * v[s]
    return out


def multi_head(params, x, y, visible):
    """Section 3.2.2: MultiHead(x, y, y) with heads side by side, times W^O."""
    heads = []
    num_heads = params["w_q"].shape[1]
    for i in range(num_heads):
        q, k, v = x @ params["w_q"][:, i], y @ params["w_k"][:, i], y @ params["w_v"][:, i]
        if "b_q" in params:
            q, k, v = q + params["b_q"][i], k + params["b_k"][i], v + params["b_v"][i]
        heads.append(attention(q, k, v, visible))
    out = np.concatenate(heads, axis=1) @ np.concatenate([params["w_o"][i] for i in range(num_heads)], axis=0)
    return out + params["b_o"] if "b_o" in params else out


def feed_forward(params, x):
    """Equation 2."""
    return np.maximum(0.0, x @ params["w_1"] + params["b_1"]) @ params["w_2"] + params["b_2"]


def layer_norm(params, x, epsilon):
    """Ba et al. 2016, row by row."""
    rows = [(row - row.mean()) / math.sqrt(row.var() + epsilon) for row in x]
    return np.array(rows) * params["scale"] + params["bias"]


def positions(length, d_model, layout="interleaved"):
    """Section 3.5, or tensor2tensor's layout: all sines, all cosines, slowest wavelength exactly 2 pi 10000."""
    table = np.zeros((length, d_model))
    for position in range(length):
        for i in range(d_model // 2):
            if layout == "interleaved":
                angle = position / 10000 ** (2 * i / d_model)
                table[position, 2 * i], table[position, 2 * i + 1] = math.sin(angle), math.cos(angle)
            else:
                angle = position / 10000 ** (i / (d_model // 2 - 1))
                table[position, i], table[position, d_model // 2 + i] = math.sin(angle), math.cos(angle)
    return table


def residual(config, params, x, sublayer):
    """LayerNorm(x + Sublayer(x)), section 3.1, or x + Sublayer(LayerNorm(x))."""
    if config.norm == "pre":
        return x + sublayer(layer_norm(params["norm"], x, config.norm_epsilon))
    return layer_norm(params["norm"], x + sublayer(x), config.norm_epsilon)


def layer_of(tree, i):
    """Layer i of a stack, in float64."""
    if isinstance(tree, dict):
        return {name: layer_of(branch, i) for name, branch in tree.items()}
    return np.asarray(tree, np.float64)[i]


def embed(config, params, tokens, side):
    """Sections 3.4 and 3.5: embedding * sqrt(d_model) + position."""
    name = "embedding" if config.tied_embeddings else f"{side}_embedding"
    matrix = np.asarray(params[name], np.float64)
    if config.positions == "learned":
        table = np.asarray(params[f"{side}_positions"], np.float64)
    else:
        table = positions(len(tokens), config.d_model, config.sinusoids)
    return np.array([matrix[token] * math.sqrt(config.d_model) + table[i] for i, token in enumerate(tokens)])


def final_norm(config, params, name, x):
    """Pre-norm stacks end with one more normalisation."""
    if config.norm == "post":
        return x
    return layer_norm(
        {leaf: np.asarray(array, np.float64) for leaf, array in params[name].items()}, x, config.norm_epsilon
    )


def encode(config, params, source):
    """The encoder, section 3.1: `source` is a list of ids without padding -> [S D]."""
    x = embed(config, params, source, "source")
    everything = [list(range(len(source)))] * len(source)
    for i in range(config.encoder_layers):
        layer = layer_of(params["encoder"], i)
        x = residual(
            config, layer["residual_1"], x, lambda y, p=layer["self_attention"]: multi_head(p, y, y, everything)
        )
        x = residual(config, layer["residual_2"], x, lambda y, p=layer["feed_forward"]: feed_forward(p, y))
    return final_norm(config, params, "encoder_norm", x)


def decode(config, params, target, memory):
    """The decoder: `target` is BOS and the pieces before each position -> logits [T W]."""
    x = embed(config, params, target, "target")
    past = [list(range(t + 1)) for t in range(len(target))]
    source = [list(range(len(memory)))] * len(target)
    for i in range(config.decoder_layers):
        layer = layer_of(params["decoder"], i)
        x = residual(config, layer["residual_1"], x, lambda y, p=layer["self_attention"]: multi_head(p, y, y, past))
        x = residual(
            config, layer["residual_2"], x, lambda y, p=layer["cross_attention"]: multi_head(p, y, memory, source)
        )
        x = residual(config, layer["residual_3"], x, lambda y, p=layer["feed_forward"]: feed_forward(p, y))
    x = final_norm(config, params, "decoder_norm", x)
    return x @ np.asarray(params["embedding" if config.tied_embeddings else "output_embedding"], np.float64).T


def transformer(config, params, source, target):
    """Figure 1, for one sentence pair without padding -> logits [T W]."""
    return decode(config, params, target, encode(config, params, source))


def smoothed_loss(logits, label, epsilon):
    """Section 5.4 at one position: cross-entropy with (1 - eps) on the label and eps / W on each of the W pieces."""
    logits = np.asarray(logits, np.float64)
    log_p = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
    loss = 0.0
    for piece in range(len(logits)):
        q = epsilon / len(logits) + (1.0 - epsilon if piece == label else 0.0)
        loss -= q * log_p[piece]
    return loss
