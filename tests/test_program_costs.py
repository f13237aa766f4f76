"""The text of compiled programs read, and their costs against formulas.

Programs compiled here for simulated CPU devices have costs that are known beforehand; short pieces of programs that
libtpu compiled show what only they have.
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from small_models import QUICK, small_config
from small_programs import LOOP, ROW_BYTES, TPU_HEAD

from transformer_jax.compile_check.collectives import replica_group
from transformer_jax.compile_check.costs import program_costs
from transformer_jax.compile_check.hlo import Instruction, parse
from transformer_jax.compile_check.products import Product
from transformer_jax.compile_check.roofline import HOP_SECONDS, exchange_seconds
from transformer_jax.model.flops import forward_flops
from transformer_jax.model.transformer import Transformer
from transformer_jax.parallel.chips import find_slice

# On 8 devices: a scan of 5 products whose batch is shared out, and the mean of all; a psum; a scan in a scan.
PROGRAM = """
import json
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

def layers(x, weights):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
    return x.mean()

def nested(x, weights):
    def outer(x, _):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0], None
    return jax.lax.scan(outer, x, None, length=3)[0]

def added(x):
    return jax.shard_map(lambda x: jax.lax.psum(x, "tensor"), mesh=mesh, in_specs=P(("data", "tensor")),
                         out_specs=P("data"))(x)

rows = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=NamedSharding(mesh, P(("data", "tensor"))))
whole = jax.ShapeDtypeStruct((5, 16, 16), jnp.float32, sharding=NamedSharding(mesh, P()))
print(json.dumps({
    "layers": jax.jit(layers).lower(rows, whole).compile().as_text(),
    "nested": jax.jit(nested).lower(rows, whole).compile().as_text(),
    "psum": jax.jit(added).lower(rows).compile().as_text(),
}))
"""


@pytest.fixture(scope="module")
def compiled():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    texts = json.loads(result.stdout.strip().split("\n")[-1])
    return {name: program_costs(parse(text)) for name, text in texts.items()}


def flops(program):
    return sum(each.times * product.flops for each in program.operations for product in each.products)


def exchanges(program):
    return [(each.times, each.collective) for each in program.operations if each.collective is not None]


def test_a_scanned_product_counts_once_for_each_turn(compiled):
    """The compiler's own analysis counts a scanned body once: 5 layers of [4 16] x [16 16] here, and 3 x 5."""
    assert flops(compiled["layers"]) == 5 * 2 * 4 * 16 * 16
    assert flops(compiled["nested"]) == 15 * 2 * 4 * 16 * 16
    assert not compiled["layers"].open_loops


def test_a_mean_over_devices_is_one_all_reduce_of_a_scalar(compiled):
    [(times, collective)] = exchanges(compiled["layers"])
    assert (times, collective.kind, collective.full_bytes, len(collective.group)) == (1, "all-reduce", 4, 8)
    assert exchanges(compiled["nested"]) == []


def test_a_psum_over_one_axis_is_an_all_reduce_within_its_groups(compiled):
    [(times, collective)] = exchanges(compiled["psum"])
    assert (times, collective.kind, collective.group) == (1, "all-reduce", (0, 1, 2, 3))
    assert collective.operand_bytes == collective.result_bytes == 4 * 16 * 4


@pytest.mark.parametrize("scan_layers", [True, False])
def test_the_model_s_flops_are_those_of_its_formula(scan_layers):
    config = small_config(scan_layers=scan_layers, encoder_layers=2, decoder_layers=3, d_k=4, d_v=6)
    source, target = jnp.ones((2, 7), jnp.int32), jnp.ones((2, 5), jnp.int32)
    model = Transformer(config)
    variables = jax.eval_shape(model.init, jax.random.key(0), source, target)
    text = jax.jit(model.apply, compiler_options=QUICK).lower(variables, source, target).compile().as_text()
    assert flops(program_costs(parse(text))) == 2 * forward_flops(config, 7, 5)


# What only TPU programs have -----------------------------------------------------------------------------------------

# Of base's train step on v5e: Q K^T for 13 rows and 8 heads, both of them dimensions of a dilated window.
ATTENTION = (
    TPU_HEAD
    + """ENTRY %main (q: bf16[13,8,256,64], k: bf16[13,8,256,64]) -> bf16[13,8,256,256] {
  %q = bf16[13,256,8,64]{3,1,2,0:T(8,128)(2,1)} parameter(0)
  %k = bf16[13,256,8,64]{3,1,2,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %c = bf16[13,8,256,256]{2,3,1,0:T(8,128)(2,1)S(1)} convolution(%q, %k), window={size=13x8 stride=12x7 \
lhs_dilate=13x8}, dim_labels=0b1f_0o1i->01bf, metadata={op_name="BTHK,BSHK->BHTS/dot_general" stack_frame_id=3}
}
"""
)


def test_batch_dimensions_written_as_dilated_windows_are_no_extra_work():
    [operation] = program_costs(parse(ATTENTION)).operations
    assert operation.products == (Product("bf16", 13 * 8, 256, 64, 256),)
    # d_k 64 fills half of an array of 128 rows, a quarter of v6e's 256.
    [product] = operation.products
    assert product.flops == 2 * 13 * 8 * 256 * 64 * 256
    assert product.padded_flops(128) == 2 * product.flops and product.padded_flops(256) == 4 * product.flops


def test_buffers_on_the_chip_are_no_memory_traffic_and_tiles_are_whole():
    [operation] = program_costs(parse(ATTENTION)).operations
    # Of the three only q lies in HBM; 64 most minor elements take the room of 128.
    assert operation.hbm_bytes == 13 * 8 * 256 * 128 * 2
    [q] = parse(ATTENTION).computations["main"].by_name["q"].arrays
    assert q.logical_bytes * 2 == q.bytes


def test_a_gradient_of_a_row_shared_window_counts_only_what_meets():
    text = ATTENTION.replace("size=13x8 stride=12x7 lhs_dilate=13x8", "size=13x8 pad=12_12x7_7 rhs_reversal=1x1")
    text = text.replace("bf16[13,8,256,256]{2,3,1,0:T(8,128)(2,1)S(1)} conv", "bf16[25,15,256,256]{2,3,1,0} conv")
    [operation] = program_costs(parse(text)).operations
    assert operation.products[0].batch == 13 * 13 * 8 * 8  # every pair of an input and a kernel position, once


def test_trip_counts_come_from_the_condition_where_the_compiler_writes_none():
    """TPU programs have no known_trip_count: 4 turns from 2 to 6 here."""
    found = {each.name: each for each in program_costs(parse(LOOP)).operations}
    assert {each.times for each in found.values()} == {4}
    by_two = LOOP.replace("s32[]{:T(128)} constant(1)", "s32[]{:T(128)} constant(2)")
    assert {each.times for each in program_costs(parse(by_two)).operations} == {2}
    known = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"11"}}')
    assert {each.times for each in program_costs(parse(known)).operations} == {11}


def test_a_loop_with_another_condition_is_named_and_its_turns_are_the_callers():
    text = LOOP.replace("direction=LT", "direction=NE").replace("body=%body", 'body=%body, metadata={op_name="search"}')
    program = program_costs(parse(text), open_trips=9)
    assert program.open_loops == ("search",) and {each.times for each in program.operations} == {9}


def test_what_a_condition_exchanges_counts_each_turn():
    """A search asks all devices after each piece whether it has ended."""
    ended = "  %ended = s32[]{:T(128)} all-reduce(%i.1), replica_groups=[1,8]<=[8], to_apply=%add\n  ROOT %lt"
    text = LOOP.replace("  ROOT %lt", ended).replace("compare(%i.1", "compare(%ended")
    found = {each.name: each for each in program_costs(parse(text), open_trips=9).operations}
    assert (found["ended"].times, found["ended"].collective.kind) == (9, "all-reduce")


def test_slices_and_updates_in_place_move_what_they_touch():
    """A scanned stack is read a layer at a time: the whole stack each turn would be six times the traffic."""
    found = {each.name: each for each in program_costs(parse(LOOP)).operations}
    small = 512  # an s32[] fills a tile of 128 words
    assert found["x"].hbm_bytes == pytest.approx(2 * ROW_BYTES, abs=2 * small)
    assert found["ys"].hbm_bytes == pytest.approx(2 * ROW_BYTES, abs=4 * small)
    assert found["work"].hbm_bytes == 2 * ROW_BYTES and found["work"].vector_elements == 64 * 128


@pytest.mark.parametrize(
    ("written", "group"),
    [
        ("replica_groups={{0,2},{1,3}}", (0, 2)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", (0, 4)),
        ("replica_groups=mesh['axis_0'=8,'axis_1'=1,'axis_2'=1] {'axis_0','axis_1'}", tuple(range(8))),
        ("replica_groups=mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'b'}", (0, 1)),
        ("source_target_pairs={{0,1},{1,2}}", (0, 1)),
        ("replica_groups={}", ()),
    ],
)
def test_the_first_group_in_every_spelling(written, group):
    instruction = Instruction("x", "all-reduce", (), (), "", f", channel_id=1, {written}, to_apply=%add", False)
    assert replica_group(instruction) == group


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        parse("HloModule m\n")


@pytest.mark.parametrize(
    ("algorithm", "links"),
    [
        ('"emitter":"RotatedPincerEmitter","strategy":"StrategyND"', 4),
        ('"emitter":"RotatedPincerEmitter","strategy":"UniDirectionNDRingStrategy"', 4),
        ('"emitter":"AllGatherWithNetRouterEmitter"', 4),
        ('"emitter":"1DAllGatherNonMajorDimImbalanced"', 2),
        ('"emitter":"SingleInputAllReduceScatterFusion","strategy":"StrategyRing"', 2),
        ('"emitter":"RotatedPincerEmitter","strategy":"UniDirection1DRingStrategy"', 2),
    ],
)
def test_an_exchange_along_one_ring_has_two_links_however_many_axes_there_are(algorithm, links):
    """As libtpu names its algorithms; on 16 x 16 chips of v5e, both axes rings."""
    gather = "f32[256,1024]{1,0:T(8,128)} all-gather(%x), channel_id=1, replica_groups=[1,256]<=[256], dimensions={0}"
    text = (
        f"{TPU_HEAD}ENTRY %main (x: f32[1,1024]) -> f32[256,1024] {{\n  %x = f32[1,1024]{{1,0:T(1,128)}} parameter(0)\n"
        f'  ROOT %g = {gather}, backend_config={{"collective_algorithm_config":{{{algorithm}}}}}\n}}\n'
    )
    [(_, collective)] = exchanges(program_costs(parse(text)))
    places = [(x, y) for x in range(16) for y in range(16)]
    hops = 128 if links == 2 else 16
    seconds = 255 * 1024 * 4 / (links * 45e9) + hops * HOP_SECONDS
    assert exchange_seconds(collective, find_slice("v5e:16x16"), places) == pytest.approx(seconds)


SPREAD = (
    TPU_HEAD
    + """%started (p: f32[8,128]) -> f32[32,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %g = f32[32,128]{1,0:T(8,128)} all-gather(%p), channel_id=5, replica_groups=[2,4]<=[8], dimensions={0}
}

%carried (p.1: f32[8,128], a: bf16[8,8], b: bf16[8,8]) -> (bf16[8,8]) {
  %p.1 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %g.1 = f32[32,128]{1,0:T(8,128)} all-gather(%p.1), channel_id=5, replica_groups=[2,4]<=[8], dimensions={0}
  %a = bf16[8,8]{1,0} parameter(1)
  %b = bf16[8,8]{1,0} parameter(2)
  ROOT %c = bf16[8,8]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}

%all-reduce-scatter (p.2: f32[32,128]) -> f32[8,128] {
  %p.2 = f32[32,128]{1,0:T(8,128)} parameter(0)
  %r = f32[32,128]{1,0:T(8,128)} all-reduce(%p.2), channel_id=6, replica_groups=[2,4]<=[8], to_apply=%add
  %i = s32[] constant(0)
  ROOT %s = f32[8,128]{1,0:T(8,128)} dynamic-slice(%r, %i, %i), dynamic_slice_sizes={8,128}
}

ENTRY %main (x: f32[8,128], u: bf16[8,8], v: bf16[8,8]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %u = bf16[8,8]{1,0} parameter(1)
  %v = bf16[8,8]{1,0} parameter(2)
  %async-collective-start = f32[32,128]{1,0:T(8,128)} fusion(%x), kind=kCustom, calls=%started
  %product = bf16[8,8]{1,0} fusion(%x, %u, %v), kind=kOutput, calls=%carried
  %async-collective-done = f32[32,128]{1,0:T(8,128)} fusion(%async-collective-start), kind=kCustom, calls=%started
  ROOT %sum = f32[8,128]{1,0:T(8,128)} fusion(%async-collective-done), kind=kCustom, calls=%all-reduce-scatter
}
"""
)


def test_an_exchange_that_fusions_carry_on_counts_once_and_their_products_too():
    """FSDP on TPU: a gather's parts run inside products, and a fused all-reduce and slice is a reduce-scatter."""
    program = program_costs(parse(SPREAD))
    assert [(each.kind, each.full_bytes) for _, each in exchanges(program)] == [
        ("all-gather", 32 * 128 * 4),
        ("reduce-scatter", 32 * 128 * 4),
    ]
    assert flops(program) == 2 * 8**3
    start, product, done, _ = program.operations
    assert start.starts == done.waits_for and not product.starts


def test_a_product_does_not_move_the_buffers_of_the_exchange_that_it_carries_on():
    """They are its operands and, in place, its results, at every turn of a loop; the exchange moves them once."""
    plain, gathered = "f32[8,128]{1,0:T(8,128)}", "f32[32,128]{1,0:T(8,128)}"
    text = SPREAD.replace("%carried (p.1: f32[8,128],", "%carried (p.1: f32[8,128], whole: f32[32,128],")
    text = text.replace("-> (bf16[8,8]) {", "-> (bf16[8,8], f32[8,128], f32[32,128]) {")
    text = text.replace(
        "%a = bf16[8,8]{1,0} parameter(1)", f"%whole = {gathered} parameter(1)\n  %a = bf16[8,8]{{1,0}} parameter(3)"
    )
    text = text.replace("  ROOT %c = bf16", "  %c = bf16").replace(
        "dim_labels=bf_io->bf\n",
        f"dim_labels=bf_io->bf\n  ROOT %t = (bf16[8,8]{{1,0}}, {plain}, {gathered}) tuple(%c, %p.1, %g.1)\n",
    )
    text = text.replace(
        "%product = bf16[8,8]{1,0} fusion(%x, %u, %v), kind=kOutput, calls=%carried",
        f"%product = (bf16[8,8]{{1,0}}, {plain}, {gathered}) fusion(%x, %async-collective-start, %v, %u), "
        "kind=kOutput, output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}, calls=%carried",
    )
    start, product, *_ = program_costs(parse(text)).operations
    assert start.hbm_bytes == (8 + 32) * 128 * 4
    assert product.hbm_bytes == 3 * 8 * 8 * 2
    assert flops(program_costs(parse(text))) == 2 * 8**3
