"""The weight-streaming kernels at real shapes, compiled for the GPUs that are not here: no register is spilled."""

import compile_for_gpu
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dense import fused as dense
from pallas_kernels.dense import specs as dense_specs
from pallas_kernels.experts import early, early_fused, tiered, tiers
from pallas_kernels.experts import fused as experts
from pallas_kernels.experts import specs as expert_specs
from pallas_kernels.head import fused as head
from pallas_kernels.head import specs as head_specs

# A program of eight warps leaves room for three others on a processor of 65536 registers up to this count. Programs of
# four warps pay less for a few more.
REGISTERS_OF_EIGHT_WARPS = 72
REGISTERS_OF_FOUR_WARPS = 88
# Programs of eight warps that walk over many tiles are two a processor, all there at once.
REGISTERS_OF_WALKING = 128
REGISTERS_OF_ONE_LAUNCH = 160  # of a few programs that nothing runs beside


# Shapes that differ from these in the number of tiles or choices only compile to the same loops.
EXPERTS = ("v4-flash", "v4.1-flash", "demo")
PRODUCTS = [name for name in dense_specs.PRODUCTS if "index" not in name or "demo" in name]
EXACT_PRODUCTS = ("v4-flash router", "v4.1-flash router")
HEADS = ("v4-flash", "v4.1-flash", "demo")


def _check(function, *arguments, most: int = REGISTERS_OF_FOUR_WARPS) -> None:
    for capability in compile_for_gpu.CAPABILITIES:
        for kernel in compile_for_gpu.kernels(function, *arguments, capability=capability):
            assert kernel.spilled_bytes == 0, (capability, kernel)
            assert kernel.registers <= most, (capability, kernel)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name):
    spec = expert_specs.SPECS[name]
    dtype = jnp.dtype(spec.dtype)
    arguments = spec.routed(), spec.shared(), spec.routes()
    x = jax.ShapeDtypeStruct((8, spec.width), jnp.float16)
    _check(
        lambda *a: experts.gate_up(*a, limit=spec.limit, scale_block=spec.block, dtype=dtype),
        x, *arguments, most=REGISTERS_OF_EIGHT_WARPS,
    )  # fmt: skip
    _check(
        lambda *a: experts.down(
            *a, chosen=spec.chosen, round_block=spec.block, scale_block=spec.block, dtype=dtype
        ),
        spec.hidden(), *arguments,
        most=REGISTERS_OF_WALKING if experts.walking_tile(spec.width, spec.channels) else REGISTERS_OF_FOUR_WARPS,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["v4-flash", "v4.1-flash"])
def test_experts_in_two_memories(name):
    spec, hot, slots = expert_specs.SPECS[name], 200, 8
    dtype, words = jnp.dtype(spec.dtype), tiers.record_words(spec.routed())
    cold = jax.ShapeDtypeStruct((spec.experts - hot, words), jnp.int32)
    records = jax.ShapeDtypeStruct((slots, words), jnp.int32)
    table = jax.ShapeDtypeStruct((1, spec.experts, 2), jnp.int32)
    layer, kept = jax.ShapeDtypeStruct((), jnp.int32), jax.eval_shape(lambda: tiers.empty(1, slots, words))
    places = jax.ShapeDtypeStruct(tiers.places_shape(spec.entries), jnp.int32)
    arguments = tiers.TieredExperts(spec.routed(hot), cold), spec.shared(), spec.routes(), places, records
    x = jax.ShapeDtypeStruct((8, spec.width), jnp.float16)
    options = dict(scale_block=spec.block, dtype=dtype)
    _check(tiered.place, layer, table, spec.routes(), kept, most=REGISTERS_OF_ONE_LAUNCH)
    _check(
        lambda *a: tiered.gate_up(*a, limit=spec.limit, **options), x, *arguments,
        most=REGISTERS_OF_EIGHT_WARPS,
    )  # fmt: skip
    _check(
        lambda *a: tiered.down(*a, chosen=spec.chosen, round_block=spec.block, **options),
        spec.hidden(), *arguments,
        most=REGISTERS_OF_WALKING if experts.walking_tile(spec.width, spec.channels) else REGISTERS_OF_FOUR_WARPS,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["v4-flash", "v4.1-flash"])
def test_early_fetches(name):
    spec, layers, slots = expert_specs.SPECS[name], 40, 8
    words, table = (
        tiers.record_words(spec.routed()),
        jax.ShapeDtypeStruct((layers, spec.experts, 2), jnp.int32),
    )
    kept = jax.eval_shape(
        lambda: early.empty(
            tiers.empty(layers, slots, words), early.nothing_seen(100, layers, 8, spec.chosen)
        )
    )
    named = jax.ShapeDtypeStruct((layers, 8 * spec.chosen), jnp.int32)
    _check(early_fused.plan, table, named, kept, most=REGISTERS_OF_ONE_LAUNCH)
    cold, layer = jax.ShapeDtypeStruct((50, words), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    _check(
        early_fused.fetch, layer, cold, table, kept.early.fetches, kept.early.turn, kept.records[0],
        most=REGISTERS_OF_EIGHT_WARPS,
    )  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_fp8_products(name):
    spec = dense_specs.PRODUCTS[name]
    _check(
        lambda x, matrix: dense.product(x, matrix, scale_block=spec.block, groups=spec.groups),
        spec.input(), spec.matrix(),
    )  # fmt: skip


@pytest.mark.parametrize("name", EXACT_PRODUCTS)
def test_exact_products(name):
    spec = dense_specs.EXACT_PRODUCTS[name]
    _check(dense.exact_product, spec.input(), spec.weight())


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_head(name, logits):
    spec = head_specs.SPECS[name]
    _check(
        lambda x, weight: head.logits_argmax(x, weight, logits=logits),
        spec.input(), spec.weight(), most=REGISTERS_OF_EIGHT_WARPS,
    )  # fmt: skip
