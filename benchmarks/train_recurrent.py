"""The attention RNN under the demo's budget: trained on the same text and pieces for the same work, scored the same.

    python benchmarks/train_recurrent.py --tokenizer runs/demo/tokenizer.model --processor-seconds 430 --output runs/rnn

Same text, word pieces, loss, label smoothing and Adam as `configs/demo.py`; one pair a row, in batches of one length,
as a recurrent layer cannot begin anew within a row. The budget is processor time of all threads, which a busy machine
leaves alone. The learning rate goes by the share of it that is used: up over a tenth of it, then linearly to 0. Writes
results.json: greedy translations of the whole test set, scored by the package's own evaluation, and the perplexity of
its references. The run is short and starts anew each time.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from recurrent_model import RecurrentTranslator

from transformer_jax.config import Config
from transformer_jax.config_loading import load_config
from transformer_jax.data.batches import BatchPlan, assemble, batches_from, plan_batches
from transformer_jax.data.sources import load_splits
from transformer_jax.data.store import TokenStore, build_store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.evaluation.bleu import corpus_scores
from transformer_jax.evaluation.perplexity import Perplexity, perplexity
from transformer_jax.evaluation.report import Evaluation
from transformer_jax.ops.loss import loss_sums
from transformer_jax.ops.masks import BOS, EOS, PAD

Params = Any
WARM_UP = 0.1
EXTRA_LENGTH, ROWS = 20, 64


def schedule(peak: float, used: float) -> float:
    """The learning rate when this share of the budget is used."""
    return peak * max(min(used / WARM_UP, (1.0 - used) / (1.0 - WARM_UP)), 1e-3)


def sums_of(model: RecurrentTranslator, smoothing: float, params: Params, batch: Any, key: Any) -> dict[str, jax.Array]:
    """`loss`, `nll` and `tokens` of a batch; a key turns dropout on."""
    rngs = {} if key is None else {"dropout": key}
    logits = model.apply({"params": params}, batch.source, batch.target, train=key is not None, rngs=rngs)
    return loss_sums(logits, jnp.asarray(batch.labels), (batch.target_segments != 0).astype(jnp.float32), smoothing)


def make_step(
    model: RecurrentTranslator, optimizer: optax.GradientTransformation, smoothing: float
) -> Callable[..., Any]:
    """A jitted (params, optimizer state, batch, key, rate) -> the same two and the loss; gradients clipped to 1."""

    def loss(params: Params, batch: Any, key: Any) -> jax.Array:
        sums = sums_of(model, smoothing, params, batch, key)
        return sums["loss"] / sums["tokens"]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, batch: Any, key: Any, rate: Any) -> tuple[Params, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, batch, key)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, jax.tree.map(lambda update: -rate * update, updates)), state, value

    return step


def train(
    model: RecurrentTranslator,
    config: Config,
    plan: BatchPlan,
    store: TokenStore,
    *,
    processor_seconds: float | None,
    updates: int | None,
) -> tuple[Params, dict[str, Any]]:
    """Parameters after so much processor time (compilation counted) or so many updates, and what was done."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=config.optimizer.beta2, eps=1e-9))
    step = make_step(model, optimizer, config.train.label_smoothing)
    token = jnp.ones((1, 2), jnp.int32)
    params = model.init(jax.random.key(config.train.seed), token, token)["params"]
    state = optimizer.init(params)
    start, begun, done, pieces = time.monotonic(), time.process_time(), 0, 0
    peak = config.optimizer.learning_rate or 1e-3
    for _, _, planned in batches_from(plan, 0, 0):
        used = done / updates if updates is not None else (time.process_time() - begun) / (processor_seconds or 1.0)
        if used >= 1.0:
            break
        key = jax.random.fold_in(jax.random.key(config.train.seed), done)
        batch = assemble(planned, store, bos_id=BOS)
        params, state, loss = step(params, state, batch, key, schedule(peak, used))
        done, pieces = done + 1, pieces + int(plan.lengths[planned.examples].sum())
        if done % 50 == 0:
            print(f"update {done:5}  loss {float(loss):.3f}  {time.monotonic() - start:.0f} s", flush=True)
    jax.block_until_ready(params)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    passed = time.monotonic() - start
    return params, {
        "parameters": parameters,
        "updates": done,
        "training_seconds": passed,
        "processor_seconds": time.process_time() - begun,
        "tokens_per_second": pieces / passed,
    }


def translate(model: RecurrentTranslator, params: Params, tokenizer: Tokenizer, sources: list[str]) -> list[str]:
    """Greedy translations in the order of their sources; rows of one length stand together."""
    encoded = tokenizer.encode(sources)
    found = [""] * len(sources)
    order = sorted((i for i, ids in enumerate(encoded) if len(ids) > 1), key=lambda i: len(encoded[i]))
    program = jax.jit(
        lambda params, source, length: model.apply({"params": params}, source, length, method="greedy"),
        static_argnums=2,
    )
    for start in range(0, len(order), ROWS):
        members = order[start : start + ROWS]
        width = -(-max(len(encoded[i]) for i in members) // 16) * 16
        source = np.full((ROWS, width), PAD, np.int32)
        for row, i in enumerate(members):
            source[row, : len(encoded[i])] = encoded[i]
        rows = np.asarray(program(params, source, width + EXTRA_LENGTH))[: len(members)]
        ids = [row[: int(np.argmax(row == EOS)) if (row == EOS).any() else len(row)].tolist() for row in rows]
        for i, text in zip(members, tokenizer.decode(ids), strict=True):
            found[i] = text
    return found


def measure_perplexity(
    model: RecurrentTranslator, params: Params, config: Config, store: TokenStore, references: list[str]
) -> Perplexity:
    """Of every pair of a store that has text on both sides, without smoothing."""
    data = dataclasses.replace(config.data, packing=False, max_length=int(store.lengths.max()), row_length=None)
    plan = plan_batches(store.lengths, data, seed=0, name="test")
    program = jax.jit(lambda params, batch: sums_of(model, 0.0, params, batch, None))
    sums = [jax.device_get(program(params, assemble(planned, store, bos_id=BOS))) for planned in plan.epoch(-1)]
    nats, pieces = (sum(float(part[name]) for part in sums) for name in ("nll", "tokens"))
    return perplexity(nats, int(pieces), [references[i] for i in plan.kept], config.data.target_language)


def run(
    config: Config,
    tokenizer: Tokenizer,
    output: pathlib.Path,
    *,
    width: int,
    processor_seconds: float | None,
    updates: int | None,
) -> Evaluation:
    """Trains, translates, scores, writes results.json into `output`."""
    splits = load_splits(config.data)
    if splits.test is None:
        raise SystemExit("the configuration has no test set")
    data = dataclasses.replace(config.data, packing=False, row_length=None)
    store, test = (build_store(text, tokenizer, output / "data") for text in (splits.train, splits.test))
    plan = plan_batches(store.lengths, data, seed=config.train.seed, name=splits.train.name)
    model = RecurrentTranslator(tokenizer.size, width, config.model.dropout)
    params, facts = train(model, config, plan, store, processor_seconds=processor_seconds, updates=updates)
    pairs = list(splits.test)
    references = [reference for _, reference in pairs]
    hypotheses = translate(model, params, tokenizer, [source for source, _ in pairs])
    evaluation = Evaluation(
        f"attention RNN, width {width}, greedy", splits.test.name, f"{data.source_language}-{data.target_language}",
        corpus_scores(hypotheses, references, data.target_language),
        measure_perplexity(model, params, config, test, references),
    )  # fmt: skip
    results = json.dumps({**facts, **evaluation.to_dict()}, indent=1, ensure_ascii=False)
    (output / "results.json").write_text(results + "\n", encoding="utf-8")
    (output / "translations.txt").write_text("".join(f"{line}\n" for line in hypotheses), encoding="utf-8")
    print(", ".join(f"{name} {value:,.0f}" for name, value in facts.items()))
    return evaluation


def main() -> None:
    """Reads the options and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/demo.py")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.model of the run it is compared with")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--width", type=int, default=160, help="160: 1.4 million parameters with 3,000 pieces")
    parser.add_argument("--learning-rate", type=float, help="the peak; the configuration's where none is given")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--processor-seconds", type=float, help="of training, compilation counted")
    budget.add_argument("--updates", type=int)
    arguments = parser.parse_args()
    rate = [] if arguments.learning_rate is None else [f"optimizer.learning_rate={arguments.learning_rate}"]
    evaluation = run(
        load_config(arguments.config, rate), Tokenizer.load(arguments.tokenizer), arguments.output,
        width=arguments.width, processor_seconds=arguments.processor_seconds, updates=arguments.updates,
    )  # fmt: skip
    print(evaluation.table())


if __name__ == "__main__":
    main()
