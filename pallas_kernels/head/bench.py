"""The head as cases to check and to time."""

import dataclasses
import importlib

import jax.numpy as jnp

from pallas_kernels import bench_case, tuning
from pallas_kernels.bench_case import (
    EXACT,
    SUMS,
    OperationCase,
    PublicProduct,
    nudged,
    random_bf16,
    random_rows,
)
from pallas_kernels.head import reference
from pallas_kernels.head.specs import SPECS, HeadSpec

CALLS = 4  # over one head, for it is larger than any cache


def cases() -> tuple[OperationCase, ...]:
    """The best token of 8 rows with the logits, as a drafter and a verifying pass need them, by both bodies."""
    specs = [(name, spec) for name, spec in SPECS.items() if name in bench_case.MODELS]
    return tuple(body(name, spec) for name, spec in specs for body in (_triton, _mosaic))


def _triton(name: str, spec: HeadSpec) -> OperationCase:
    """What a step launches."""
    return dataclasses.replace(
        _case(f"{name} head", spec, "fused", ("tile_winners", "winners")),
        public=PublicProduct("bf16", ((spec.tokens, spec.width),)),
        choices={tuning.by_shape(spec.tokens, spec.width): ({"warps": 4}, {"warps": 8})},
    )


def _mosaic(name: str, spec: HeadSpec) -> OperationCase:
    # Of the sizes that the interpreters are quick enough for; they need no tensor core here.
    case = _case(f"{name} head, Mosaic", spec, "mosaic", ("streamed_winners", "winners"))
    return dataclasses.replace(case, capability="9.0", interpreted=name == "demo")


def _case(name: str, spec: HeadSpec, body: str, kernels: tuple[str, ...]) -> OperationCase:
    def fused(shared, _):
        launches = importlib.import_module(f"pallas_kernels.head.{body}")
        x, weight = shared
        token, best, logits = launches.logits_argmax(x, weight, logits=True)
        return _named(token, best, logits), (nudged(x, token[:, None]), weight)

    return OperationCase(
        "head", name, kernels, bench_case.tree_bytes(spec.weight()), CALLS,
        lambda calls: ((random_rows(1, spec.input()), random_bf16(0, spec.weight())), [None] * calls),
        fused, lambda shared, _: _named(*reference.logits_argmax(*shared, logits=True)),
        {"token": EXACT, "best": SUMS, "logits": SUMS},
    )  # fmt: skip


def _named(token: jnp.ndarray, best: jnp.ndarray, logits: jnp.ndarray) -> bench_case.Outputs:
    return {"token": token, "best": best, "logits": logits}
