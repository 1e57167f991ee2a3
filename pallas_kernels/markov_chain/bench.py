"""The drafter's Markov chain as cases to check and to time."""

import jax
import jax.numpy as jnp

from pallas_kernels.bench_case import EXACT, SUMS, OperationCase, normal
from pallas_kernels.markov_chain import reference
from pallas_kernels.markov_chain.reference import Draw
from pallas_kernels.markov_chain.specs import SPECS, ChainSpec

CALLS = 3
TOKENS = {"v4-flash": 5, "v4.1-flash": 5, "demo": 5}


def cases() -> tuple[OperationCase, ...]:
    """A block's tokens, taken greedily and drawn."""
    return tuple(
        _case(model, SPECS[model], tokens, drawn)
        for model, tokens in TOKENS.items()
        for drawn in (False, True)
    )


def _case(model: str, spec: ChainSpec, tokens: int, drawn: bool) -> OperationCase:
    def operands(calls):
        from pallas_kernels import device_barrier
        from pallas_kernels.markov_chain import fused as launches

        uniforms = jax.random.uniform(jax.random.key(3, impl="rbg"), (tokens, 2))
        draw = Draw(jnp.float32(0.7), jnp.float32(0.0), uniforms) if drawn else None
        embed = normal(1, spec.vocabulary, spec.rank, dtype=jnp.bfloat16)
        base = normal(2, tokens, spec.vocabulary, scale=3.0)
        counters = device_barrier.counters(launches.COUNTER_LINES)
        scale = spec.rank**-0.5
        heads = [
            normal(10 + i, spec.vocabulary, spec.rank, dtype=jnp.bfloat16, scale=scale) for i in range(calls)
        ]
        return (base, jnp.int32(11), embed, draw, counters), heads

    def named(ids, logits, counters):
        # The counters' sign bits tell how often a barrier was passed.
        return {"ids": ids, "logits": logits, "counters": counters & 0x7FFFFFFF}

    def fused(shared, head):
        from pallas_kernels.markov_chain import fused as launches

        base, anchor, embed, draw, counters = shared
        ids, logits, counters = launches.chain(
            spec, base, anchor, embed, head, jnp.int32(tokens), counters, draw
        )
        return named(ids, logits, counters), (base, ids[-1], embed, draw, counters)

    def definition(shared, head):
        base, anchor, embed, draw, counters = shared
        made = reference.chain(spec, base, anchor, embed, head, jnp.int32(tokens), draw)
        return named(*made, counters)

    return OperationCase(
        "markov_chain", f"{model} chain of {tokens} tokens, {'drawn' if drawn else 'greedy'}", ("chain",),
        tokens * spec.vocabulary * (2 * spec.rank + 4), CALLS, operands, fused, definition,
        {"ids": EXACT, "logits": SUMS, "counters": EXACT}, interpreted=model == "demo",
    )  # fmt: skip
