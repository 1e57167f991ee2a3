"""The head as cases to check and to time."""

import jax.numpy as jnp

from pallas_kernels import bench_case
from pallas_kernels.bench_case import EXACT, SUMS, OperationCase, nudged, random_bf16, random_rows
from pallas_kernels.head import reference
from pallas_kernels.head.specs import SPECS, HeadSpec

CALLS = 4  # over one head, for it is larger than any cache


def cases() -> tuple[OperationCase, ...]:
    """The best token of 8 rows with the logits, as a drafter and a verifying pass need them."""
    return tuple(_case(name, spec) for name, spec in SPECS.items() if name in bench_case.MODELS)


def _case(name: str, spec: HeadSpec) -> OperationCase:
    def fused(shared, _):
        from pallas_kernels.head import fused as launches

        x, weight = shared
        token, best, logits = launches.logits_argmax(x, weight, logits=True)
        return _named(token, best, logits), (nudged(x, token[:, None]), weight)

    return OperationCase(
        "head", f"{name} head", ("tile_winners", "winners"), bench_case.tree_bytes(spec.weight()), CALLS,
        lambda calls: ((random_rows(1, spec.input()), random_bf16(0, spec.weight())), [None] * calls),
        fused, lambda shared, _: _named(*reference.logits_argmax(*shared, logits=True)),
        {"token": EXACT, "best": SUMS, "logits": SUMS},
    )  # fmt: skip


def _named(token: jnp.ndarray, best: jnp.ndarray, logits: jnp.ndarray) -> bench_case.Outputs:
    return {"token": token, "best": best, "logits": logits}
