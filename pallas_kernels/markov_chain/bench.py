"""The drafter's Markov chain as cases to check and to time."""

import jax
import jax.numpy as jnp

from pallas_kernels.bench_case import EXACT, SUMS, OperationCase, normal
from pallas_kernels.markov_chain import reference
from pallas_kernels.markov_chain.reference import Draw
from pallas_kernels.markov_chain.specs import SPECS, ChainSpec
from pallas_kernels.sampling_law.reference import Filters

CALLS = 3
TOKENS = {"v4-flash": 5, "v4.1-flash": 5, "demo": 5}
QUICK = ("greedy", "drawn")  # a filter's passes are many rounds in Triton's interpreter
# Top-k and top-p of the drawn chains.
FILTERS = {"drawn": (0, 1.0), "drawn with top-p": (0, 0.95), "drawn with top-k and top-p": (40, 0.95)}


def cases() -> tuple[OperationCase, ...]:
    """A block's tokens, taken greedily and drawn, with filters and without."""
    return tuple(
        _case(model, SPECS[model], tokens, way)
        for model, tokens in TOKENS.items()
        for way in ("greedy", *FILTERS)
    )


def _case(model: str, spec: ChainSpec, tokens: int, way: str) -> OperationCase:
    def operands(calls):
        from pallas_kernels import device_barrier
        from pallas_kernels.markov_chain import fused as launches

        uniforms = jax.random.uniform(jax.random.key(3, impl="rbg"), (tokens, 2))
        draw = None
        if way in FILTERS:
            top_k, top_p = FILTERS[way]
            filters = Filters(jnp.float32(0.7), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(0.0))
            draw = Draw(filters, uniforms)
        embed = normal(1, spec.vocabulary, spec.rank, dtype=jnp.bfloat16)
        base = normal(2, tokens, spec.vocabulary, scale=3.0)
        counters = device_barrier.counters(launches.COUNTER_LINES)
        scale = spec.rank**-0.5
        heads = [
            normal(10 + i, spec.vocabulary, spec.rank, dtype=jnp.bfloat16, scale=scale) for i in range(calls)
        ]
        return (base, jnp.int32(11), embed, draw, counters), heads

    def named(ids, by, counters):
        # The counters' sign bits tell how often a barrier was passed.
        return {"ids": ids, "by": by, "counters": counters & 0x7FFFFFFF}

    def fused(shared, head):
        from pallas_kernels.markov_chain import fused as launches

        base, anchor, embed, draw, counters = shared
        ids, by, counters = launches.chain(spec, base, anchor, embed, head, jnp.int32(tokens), counters, draw)
        return named(ids, by, counters), (base, ids[-1], embed, draw, counters)

    def definition(shared, head):
        base, anchor, embed, draw, counters = shared
        made = reference.chain(spec, base, anchor, embed, head, jnp.int32(tokens), draw)
        return named(*made, counters)

    return OperationCase(
        "markov_chain", f"{model} chain of {tokens} tokens, {way}", ("chain",),
        tokens * spec.vocabulary * (2 * spec.rank + 4), CALLS, operands, fused, definition,
        {"ids": EXACT, "by": SUMS, "counters": EXACT}, interpreted=model == "demo" and way in QUICK,
    )  # fmt: skip
