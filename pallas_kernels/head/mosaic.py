"""The head as a Pallas Mosaic kernel for Hopper, beside the Triton body; `reference` defines it.

Knows: how one warpgroup streams the weight through shared memory by TMA while another multiplies it by the rows with
wgmma. Does not know: the last choice among the programs' winners (`fused.best_of`), or which body a step uses.

    weight [V, D]: tiles of 64 tokens, in chunks of up to 256 columns        rows [8 terms, D]
          |  TMA, four chunks ahead                                              |  TMA, once
    ring [4, 64, 256] -- wgmma, 64 tokens x 8 terms, one accumulator a chunk -- rows in shared memory
          |  float32 sums of a tile's chunks in order, then of the terms
    logits, and each lane's best token so far; at the end one winner a row and program

Program p takes the tiles p, p + programs, ... and never lets the ring run dry between two of them. A chunk has an
accumulator of its own because the tensor cores cut sums instead of rounding them: short chains keep that out of the
logits. wgmma and its layouts exist on compute capability 9.0 alone, so GB300 needs another body.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launch
from pallas_kernels.dense.packing import bfloat_terms
from pallas_kernels.head import fused
from pallas_kernels.tiles import ROWS

PROGRAMS = 132  # processors of an H200; any number gives the same logits
TOKENS = 64  # of a tile: wgmma's M
SLOTS = 4
SHARED_BYTES = (
    225 * 1024
)  # of the 227 KB a program may ask for; barriers and the last reduction take the rest
_CHUNKS = (256, 128, 64)  # columns; 64 of bfloat16 fill the swizzled line of 128 bytes that wgmma reads
_LAST = 0x7FFFFFFF
_LOAD, _MULTIPLY = 0, 1  # what each warpgroup does
_LAYOUT = plgpu.Layout.WGMMA
# The same places, held one by one: pairs of rows are not adjacent in the logits, where tokens are.
_SINGLE = plgpu.Layout._WGMMA_ACC_32BIT


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes of a launch: V tokens and D columns of the weight, terms of the rows, columns of a chunk."""

    tokens: int
    columns: int
    terms: int
    chunk: int

    tiles = property(lambda self: self.tokens // TOKENS)
    programs = property(lambda self: min(PROGRAMS, self.tiles))
    chunks = property(lambda self: self.columns // self.chunk)
    lanes = property(lambda self: ROWS * self.terms)

    @property
    def shared_bytes(self) -> int:
        """The rows and the ring."""
        return 2 * (self.lanes * self.columns + SLOTS * TOKENS * self.chunk)


def logits_argmax(x: jax.Array, weight: jax.Array, *, logits: bool = False):
    """`reference.logits_argmax` on an H200; V and D must be multiples of 64, and there are 8 rows.

    Raises ValueError for other shapes and for rows that leave too little shared memory for the ring: at D = 5120
    bfloat16 rows fit, float32 rows (three bfloat16 terms) do not.
    """
    tokens, columns = weight.shape
    if weight.dtype != jnp.bfloat16 or tokens % TOKENS or columns % _CHUNKS[-1] or x.shape != (ROWS, columns):
        raise ValueError(
            f"head is {weight.dtype} {weight.shape} for rows {x.shape}, expected bfloat16 [64 a, 64 b] for rows "
            f"[{ROWS}, 64 b]"
        )
    terms = bfloat_terms(x)
    plan = _Plan(tokens, columns, len(terms), next(size for size in _CHUNKS if columns % size == 0))
    if plan.shared_bytes > SHARED_BYTES:
        raise ValueError(
            f"{x.dtype} rows of width {columns} need {plan.shared_bytes} bytes of shared memory with the weight's "
            f"ring, expected at most {SHARED_BYTES}"
        )
    places, *full = _launch(plan, terms.reshape(plan.lanes, columns), weight, logits)
    best = fused.best_of(places, plan.programs, row=1, tile=ROWS, part=ROWS * plan.programs)
    return (*best, *full)


def _launch(plan: _Plan, rows: jax.Array, weight: jax.Array, logits: bool) -> list[jax.Array]:
    swizzled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    outputs = [jax.ShapeDtypeStruct((2, plan.programs, ROWS), jnp.int32)]
    if logits:
        outputs.append(jax.ShapeDtypeStruct((ROWS, plan.tokens), jnp.float32))
    return plgpu.kernel(
        functools.partial(streamed_winners, plan),
        kernel_name="streamed_winners",
        out_type=outputs,
        grid=(plan.programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((plan.chunks, plan.lanes, plan.chunk), jnp.bfloat16, transforms=swizzled),
            plgpu.SMEM((SLOTS, TOKENS, plan.chunk), jnp.bfloat16, transforms=swizzled),
            plgpu.Barrier(num_arrivals=plan.chunks),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_barriers=SLOTS),
        ),
        # Layouts are given, not inferred: inference knows no way from wgmma's pairs to _SINGLE.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if launch.INTERPRETED else None,
    )(rows, weight)


def streamed_winners(plan: _Plan, rows_in, weight_in, winners_out, *others) -> None:
    """winners int32 [2, programs, 8]: ordered bits of a program's best logit, and the last number minus its token id.

    rows bf16 [8 terms, D]; weight bf16 [V, D]; logits float32 [8, V], written if there is such an output.
    """
    *logits_out, rows, ring, rows_here, here, free = others
    program = lax.axis_index("program")
    warpgroup = lax.axis_index("warpgroup")
    own_tiles = (plan.tiles - program + plan.programs - 1) // plan.programs

    def tokens_of(turn):
        return pl.ds((program + plan.programs * turn) * TOKENS, TOKENS)

    @pl.when(warpgroup == _LOAD)
    def _():
        for chunk in range(plan.chunks):
            columns = pl.ds(chunk * plan.chunk, plan.chunk)
            plgpu.copy_gmem_to_smem(rows_in.at[:, columns], rows.at[chunk], rows_here)

        def load(step, _):
            slot = lax.rem(step, SLOTS)
            columns = pl.ds(lax.rem(step, plan.chunks) * plan.chunk, plan.chunk)

            @pl.when(step >= SLOTS)
            def _():
                plgpu.barrier_wait(free.at[slot])

            place = weight_in.at[tokens_of(step // plan.chunks), columns]
            plgpu.copy_gmem_to_smem(place, ring.at[slot], here.at[slot])

        def drain(step, _):
            plgpu.barrier_wait(free.at[lax.rem(step, SLOTS)])

        steps = own_tiles * plan.chunks
        lax.fori_loop(0, steps, load, None)
        # No barrier may go away with a phase that this warpgroup has not seen.
        lax.fori_loop(jnp.maximum(steps - SLOTS, 0), steps, drain, None)

    @pl.when(warpgroup == _MULTIPLY)
    def _():
        plgpu.barrier_wait(rows_here)

        def add_chunk(turn, chunk, sums):
            slot = lax.rem(turn * plan.chunks + chunk, SLOTS)
            plgpu.barrier_wait(here.at[slot])

            def product(accumulator):
                plgpu.wgmma(accumulator, ring.at[slot], rows.at[chunk].transpose((1, 0)))
                return accumulator[...]  # waits for the product

            made = pl.run_scoped(product, plgpu.ACC((TOKENS, plan.lanes), jnp.float32))
            plgpu.barrier_arrive(free.at[slot])
            return sums + made

        def add_tile(turn, best):
            logit, token = best
            sums = lax.fori_loop(
                0, plan.chunks, functools.partial(add_chunk, turn), _filled((TOKENS, plan.lanes), 0.0)
            )
            found = sums[:, :ROWS]
            for term in range(1, plan.terms):
                found += sums[:, term * ROWS : (term + 1) * ROWS]
            for place in logits_out:
                place.at[:, tokens_of(turn)].transpose((1, 0))[...] = plgpu.layout_cast(found, _SINGLE)
            better = found > logit  # a lane's tokens rise, so the first of equals stays
            here_tokens = plgpu.broadcasted_iota(jnp.int32, (TOKENS, ROWS), 0, layout=_LAYOUT)
            return jnp.where(better, found, logit), jnp.where(
                better, here_tokens + tokens_of(turn).start, token
            )

        logit, token = lax.fori_loop(
            0, own_tiles, add_tile, (_filled((TOKENS, ROWS), -jnp.inf), _filled((TOKENS, ROWS), 0))
        )
        top = jnp.max(logit, axis=0)
        equal = logit == plgpu.layout_cast(lax.broadcast_in_dim(top, (TOKENS, ROWS), (1,)), _LAYOUT)
        bits = lax.bitcast_convert_type(top, jnp.int32)  # never those of -0, for sums begin with +0
        winners_out[0, program] = bits ^ ((bits >> 31) & _LAST)
        winners_out[1, program] = _LAST - jnp.min(jnp.where(equal, token, _LAST), axis=0)


def _filled(shape: tuple[int, ...], value: float | int) -> jax.Array:
    dtype = jnp.int32 if isinstance(value, int) else jnp.float32
    return plgpu.layout_cast(jnp.full(shape, value, dtype), _LAYOUT)
