"""The fused cache writes compile for both GPUs at real shapes, and keep their values in registers."""

import compile_for_gpu
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tuning
from pallas_kernels.dense.specs import PRODUCTS
from pallas_kernels.device_barrier import LINE_WORDS
from pallas_kernels.key_rows import fused, specs
from pallas_kernels.key_rows.reference import Caches, Compressor, LatentIndex, Rows
from pallas_kernels.rows import Columns

ROWS, CONTEXT, SPLITS = 8, 65536, 8
CASES = {
    "window": (specs.V4_FLASH, None, 1024),
    "ratio 4": (specs.V4_FLASH, specs.V4_RATIO_4, 1024),
    "ratio 128": (specs.V4_FLASH, specs.V4_RATIO_128, 1024),
    "ratio 2": (specs.V41_FLASH, specs.V41_RATIO_2, 1280),
    "ratio 1": (specs.V41_FLASH, specs.V41_RATIO_1, 1280),
    "demo ratio 2": (specs.DEMO, specs.DEMO_RATIO_2, 128),
}
QUERIES = {
    "window": "v4-flash wq_b", "ratio 4": "v4-flash wq_b index", "ratio 128": "v4-flash wq_b",
    "ratio 2": "v4.1-flash wq_b index", "ratio 1": "v4.1-flash wq_b index", "demo ratio 2": "demo wq_b index",
}  # fmt: skip
KEYED_BY_ENTRIES = ("ratio 2", "ratio 1", "demo ratio 2")  # two launches
REGISTERS = 80  # of eight warps, so that three programs fit on a processor of 65536 registers
WALKING_REGISTERS = 88  # where few programs walk over all tiles: two fit


def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype)


def product(width):
    return Columns(shape(jnp.float32, SPLITS, ROWS, width + 64), 64, width)


def operands(spec, pool, latent):
    """Rows, caches, length, count, compressor and index of a layer as the checkpoints have them."""
    turns = shape(jnp.float32, ROWS, 2, spec.rope // 2)
    rows = Rows(
        product(spec.width), shape(spec.type, spec.width), turns, product(latent), shape(spec.type, latent)
    )
    caches, compressor, index = dict(window=shape(spec.type, 136, spec.width)), None, None
    if pool is not None:
        halves, closing = 2 if pool.overlap else 1, pool.closing(ROWS)
        slots, entries = halves * pool.ratio + ROWS, CONTEXT // pool.ratio + closing

        def make(width, rope):
            return Compressor(
                product(halves * width),
                product(halves * width) if pool.ratio > 1 else None,
                shape(jnp.float32, pool.ratio, halves * width) if pool.ratio >= 4 else None,
                shape(spec.type, width),
                shape(jnp.float32, closing, 2, rope // 2),
            )

        compressor = make(spec.width, spec.rope)
        caches["entries"] = shape(spec.type, entries, spec.width)
        if pool.ratio > 1:
            caches["pending"] = shape(jnp.float32, slots, 2, halves * spec.width)
        if pool.index_width:
            caches["index_keys"] = shape(spec.type, entries, pool.index_width)
        if pool.hadamard:
            caches["index_pending"] = shape(jnp.float32, slots, 2, halves * pool.index_width)
            index = make(pool.index_width, pool.index_rope)
        elif pool.index_width:
            index = LatentIndex(
                shape(spec.type, pool.index_width, spec.width),
                shape(spec.type, pool.index_width),
                shape(jnp.float32, closing, 2, pool.index_rope // 2),
            )
    return rows, Caches(**caches), shape(jnp.int32), shape(jnp.int32), compressor, index


def _quick(quick):
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in quick)]


@pytest.mark.parametrize("capability", compile_for_gpu.CAPABILITIES)
@pytest.mark.parametrize("name", _quick(["ratio 2"]))
def test_no_spills_at_real_shapes(name, capability):
    spec, pool, latent = CASES[name]

    def write(rows, caches, length, count, compressor, index):
        return fused.write(rows, caches, length, count, spec, pool, compressor, index)

    (kernel,) = compile_for_gpu.kernels(write, *operands(spec, pool, latent), capability=capability)
    assert kernel.spilled_bytes == 0


@pytest.mark.parametrize("capability", compile_for_gpu.CAPABILITIES)
@pytest.mark.parametrize("name", _quick(["ratio 4", "ratio 128"]))
def test_writes_leave_the_query_product_its_registers(name, capability):
    spec, pool, latent = CASES[name]
    product = PRODUCTS[QUERIES[name]]

    def write(rows, caches, length, count, compressor, index, matrix, counters):
        return fused.write_and_query(
            rows, caches, length, count, spec, matrix, counters, pool, compressor, index,
            scale_block=product.block,
        )  # fmt: skip

    counters = shape(jnp.int32, fused.COUNTER_LINES * LINE_WORDS)
    kernels = compile_for_gpu.kernels(
        write, *operands(spec, pool, latent), product.matrix(), counters, capability=capability
    )
    names = [kernel.name for kernel in kernels]
    joined = ["cache_writes_and_queries"]
    assert names == (["cache_writes", "fp8_product"] if name in KEYED_BY_ENTRIES else joined)
    recorded = tuning.tiles("key_rows").get(tuning.by_shape(product.rows, product.columns), {})
    most = WALKING_REGISTERS if recorded.get("each", 1) > 1 else REGISTERS
    for kernel in kernels:
        assert kernel.spilled_bytes == 0
        assert kernel.name not in joined or kernel.registers <= most
