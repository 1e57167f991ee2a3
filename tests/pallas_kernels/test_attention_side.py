"""The references of attention, cache writes and index selection together are the model's attention sublayer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import FAMILIES, toy

from pallas_kernels import rows as row_tools
from pallas_kernels.attention import reference as attention
from pallas_kernels.attention.specs import AttentionSpec
from pallas_kernels.index_selection import reference as selection
from pallas_kernels.index_selection.specs import IndexSpec
from pallas_kernels.key_rows import reference as key_rows
from pallas_kernels.key_rows.specs import FP4_GROUPS, FP8_BLOCKS, PoolSpec, RowSpec
from pallas_kernels.rows import turn_table, whole
from v4flash.model.attention import Attention, Choice

ROWS, CONTEXT = 8, 320
# The same float32 numbers in the same order but for the softmax and the sums over keys: differences of up to 4e-6
# were seen. With rounding, one last bit can move a value of size 1 by a step of E4M3.
TOLERANCE = {False: 5e-5, True: 0.07}
PLACES = [(0, 1), (0, 8), (2, 8), (13, 3), (15, 8), (121, 8), (127, 1), (200, 6), (255, 8)]


def product(linear, x):
    """A Linear's product before it is rounded to the model's type."""
    return whole(linear.numerics.product("tk,nk->tn", linear.rounded_input(x), linear.decoded()))


def exact(linear, x):
    return whole(linear.numerics.exact_product("tk,nk->tn", x, linear.weight[...]))


def compressor(module, x, table):
    return key_rows.Compressor(
        exact(module.wkv, x),
        None if module.wgate is None else exact(module.wgate, x),
        None if module.ape is None else module.ape[...],
        module.norm.weight[...],
        table,
    )


def sublayer(attn: Attention, x, state, count, choice):
    """`Attention.__call__` put together from the references."""
    config, layer, numerics, length = attn.config, attn.layer, attn.numerics, state.length
    eps, ratio, rope = config.rms_norm_eps, layer.ratio, config.qk_rope_head_dim
    dtype = jnp.dtype(numerics.dtype).name
    positions = length + jnp.arange(ROWS, dtype=jnp.int32)
    table = turn_table(positions, attn.frequencies)
    spec = RowSpec(
        config.head_dim, rope, eps, config.kv_rounded_dims, config.kv_round_block, config.weight_block_size,
        numerics.quantise, dtype,
    )  # fmt: skip
    rows = key_rows.Rows(
        product(attn.wkv, x), attn.kv_norm.weight[...], table, product(attn.wq_a, x), attn.q_norm.weight[...]
    )
    owner = layer.kv_source
    caches = key_rows.Caches(state.windows[layer.index])
    pool = entries = index = None
    index_rope = min(rope, config.index_head_dim)
    if layer.owns_entries:
        rounding = FP4_GROUPS if config.fp4_entries else FP8_BLOCKS
        pool = PoolSpec(
            ratio, attn.compressor.overlap, rounding, config.index_head_dim, index_rope, config.hadamard_index
        )
        turned = ratio * (length // ratio + jnp.arange(pool.closing(ROWS), dtype=jnp.int32))
        entries = compressor(attn.compressor, x, turn_table(turned, attn.frequencies))
        names = ("pending", "entries", "index_pending", "index_keys")
        caches = key_rows.Caches(caches.window, *(getattr(state, name).get(owner) for name in names))
        if attn.indexer is not None:
            index_table = turn_table(turned, attn.indexer.frequencies)
            if attn.indexer.compressor is not None:
                index = compressor(attn.indexer.compressor, x, index_table)
            else:
                index = key_rows.LatentIndex(
                    attn.indexer.wk.weight[...], attn.indexer.k_norm.weight[...], index_table
                )
    caches, latent = key_rows.write(rows, caches, length, count, spec, pool, entries, index)
    state = state.with_window(layer.index, caches.window)
    if layer.owns_entries:
        for name in names:
            if getattr(caches, name) is not None:
                state = state.with_item(name, owner, getattr(caches, name))
    latent = latent.astype(numerics.dtype)
    if layer.owns_indexer:
        index_spec = IndexSpec(
            config.index_n_heads, config.index_head_dim, index_rope, ratio, config.index_topk, layer.candidate,
            config.candidate_block_size or 8, config.candidate_topk_blocks, config.hadamard_index,
            numerics.quantise, dtype,
        )  # fmt: skip
        choice = selection.choose(
            already_rounded(attn.indexer.wq_b, latent), product(attn.indexer.weights_proj, x),
            turn_table(positions, attn.indexer.frequencies), state.index_keys[owner], length, count, index_spec,
            choice[1],
        )  # fmt: skip
    far = None
    if layer.index_source is not None:
        far = attention.Chosen(state.entries[owner], choice[0].ids, choice[0].counts)
    elif ratio:
        far = attention.Visible(state.entries[owner], ratio)
    attention_spec = AttentionSpec(
        config.num_attention_heads, config.head_dim, rope, config.sliding_window,
        eps if config.normalise_query_heads else None, dtype,
    )  # fmt: skip
    heads = attention.attend(
        already_rounded(attn.wq_b, latent), table, attn.attn_sink[...], state.windows[layer.index], length, count,
        far, attention_spec,
    )  # fmt: skip
    return projected(attn, heads), state, choice


def already_rounded(linear, x):
    """The product of activations that were rounded by their producer."""
    return whole(linear.numerics.product("tk,nk->tn", x, linear.decoded()))


def projected(attn, heads):
    """The grouped output projection of heads that were rotated back already."""
    config = attn.config
    weight = attn.wo_a.decoded().reshape(config.o_groups, config.o_lora_rank, -1)
    latent = attn.numerics.product("tgk,grk->tgr", heads.reshape(ROWS, config.o_groups, -1), weight)
    return attn.wo_b(latent.astype(attn.numerics.dtype).reshape(ROWS, -1))


@functools.cache
def both(family, quantise):
    """Jitted (xs, state, count) -> (outputs, state) of all layers, by the model and by the references."""
    model = toy(family, quantise)

    def layers(body, choice, xs, state, count):
        outputs = []
        for layer, x in zip(model.model.backbone.layers, xs, strict=True):
            out, state, choice = body(layer.attn, x, state, count, choice)
            outputs.append(out)
        return outputs, state

    def by_model(attn, x, state, count, choice):
        return attn(x, state, state.length + jnp.arange(ROWS, dtype=jnp.int32), count, choice)

    # One program, so that what both share is compiled once.
    return jax.jit(
        lambda *given: (layers(by_model, Choice(), *given), layers(sublayer, (None, None), *given))
    )


@pytest.mark.parametrize("family,quantise", [("v4", True), ("v41", True)])
def test_the_references_together_are_the_models_sublayer(family, quantise):
    model = toy(family, quantise)
    random = np.random.default_rng(5)
    empty = model.state(CONTEXT, ROWS)
    for length, count in PLACES:
        noise = jax.tree.map(lambda a: jnp.asarray(random.normal(size=a.shape), a.dtype), empty)
        state = noise.replace(length=jnp.int32(length), tokens=empty.tokens)
        xs = [
            jnp.asarray(random.normal(size=(ROWS, model.config.hidden_size)), jnp.float32)
            for _ in model.config.layers
        ]
        (expected, expected_state), (found, found_state) = both(family, quantise)(xs, state, jnp.int32(count))
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours[:count], theirs[:count], atol=TOLERANCE[quantise], rtol=0)
        for ours, theirs in zip(jax.tree.leaves(found_state), jax.tree.leaves(expected_state), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=TOLERANCE[quantise], rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_block_reference_is_the_drafters_attention(family):
    model = toy(family)
    config, random = model.config, np.random.default_rng(6)
    ring = jnp.asarray(random.normal(size=model.state(CONTEXT, ROWS).draft_windows[0].shape), jnp.float32)
    x = jnp.asarray(random.normal(size=(ROWS, config.hidden_size)), jnp.float32)
    spec = RowSpec(
        config.head_dim, config.qk_rope_head_dim, config.rms_norm_eps, config.kv_rounded_dims,
        config.kv_round_block, config.weight_block_size, quantise=False, dtype="float32",
    )  # fmt: skip
    attention_spec = AttentionSpec(
        config.num_attention_heads, config.head_dim, config.qk_rope_head_dim, config.sliding_window,
        config.rms_norm_eps if config.normalise_query_heads else None, "float32",
    )  # fmt: skip

    @jax.jit
    def compared(length, live):
        stage = model.model.drafter.stages[0].attn
        positions = length + jnp.arange(ROWS, dtype=jnp.int32)
        expected = stage.attend_block(x, ring, length - 1, positions, jnp.arange(ROWS) < live)
        table = turn_table(positions, stage.frequencies)
        rows = key_rows.Rows(
            product(stage.wkv, x), stage.kv_norm.weight[...], table,
            product(stage.wq_a, x), stage.q_norm.weight[...],
        )  # fmt: skip
        keys, latent = key_rows.block_rows(rows, spec)
        heads = attention.attend(
            already_rounded(stage.wq_b, latent), table, stage.attn_sink[...], ring, length, live,
            attention.Block(keys), attention_spec,
        )  # fmt: skip
        return projected(stage, heads), expected

    for length, live in [(0, 1), (9, 8), (16, 3), (60, 5)]:
        found, expected = compared(jnp.int32(length), jnp.int32(live))
        np.testing.assert_allclose(found[:live], expected[:live], atol=TOLERANCE[False], rtol=0)


def test_columns_outside_of_a_product_are_refused():
    with pytest.raises(ValueError, match="columns 3 to 10"):
        row_tools.Columns(jnp.zeros((1, 8, 8)), 3, 8)
