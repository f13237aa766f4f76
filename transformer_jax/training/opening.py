"""What a run says of its model, text and batches before its first update."""

from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from transformer_jax.parallel.rules import kept_whole
from transformer_jax.training.preparation import Prepared
from transformer_jax.training.state import Params


def opening(prepared: Prepared, params: Params, mesh: Mesh, row_multiple: int) -> Iterator[str]:
    """Lines for people; rows are filled up to a multiple of `row_multiple`."""
    splits, plan, dev_plan, outlook = prepared.splits, prepared.plan, prepared.dev_plan, prepared.plan.outlook
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    amount = f"{mesh.size}" if mesh.size == jax.device_count() else f"{mesh.size} of {jax.device_count()}"
    yield f"model      {parameters:,} parameters on {amount} {jax.devices()[0].device_kind} device(s)"
    for name, reason in kept_whole(params, mesh, over_data=prepared.config.mesh.shard_weight_update).items():
        yield f"           {name}: {reason}"
    yield (
        f"text       {splits.train.name}: {len(plan.kept):,} pairs of {len(plan.lengths):,} "
        f"(dropped are {plan.reasons})"
    )
    translated = min(prepared.config.train.evaluate_sentences, len(dev_plan.lengths))
    yield (
        f"dev        {splits.dev.name}: loss over {len(dev_plan.kept):,} pairs of {len(dev_plan.lengths):,}, "
        f"the first {translated:,} translated"
    )
    if splits.test is None:
        yield "test       no test text was given: at its end the run is scored on the dev text"
    shapes = ", ".join(
        f"{s.rows} x ({s.source_width} + {s.target_width})" for s in (s.filled_up(row_multiple) for s in plan.shapes)
    )
    yield (
        f"batches    {'' if outlook.exact else 'about '}{outlook.batches:,} an epoch, "
        f"fill {plan.fill(outlook.planned, row_multiple):.1%}, "
        f"{len(plan.shapes)} static shape(s), rows x (source + target): {shapes}"
    )
