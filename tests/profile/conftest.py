"""A small program with everything that the report counts, compiled for each target once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from doubling_kernel import doubling_kernel

from pallas_kernels import formats, launch
from v4flash.profile import deviceless, targets
from v4flash.profile.deviceless import Compiled

ROWS, WIDTH, OUT, TRIPS = 8, 1024, 2048, 7
BLOCK = 128
TRITON_CALLS = 3
CACHE = (4096, 128)  # 2 MB in float32


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What the program is made of; a loop of no trips is left out."""

    trips: int = TRIPS
    donated: bool = True
    triton: bool = True


def program(pieces: Pieces):
    """step(params, stream, control): decodes a weight before a product, loops, branches, writes a cache."""

    def step(params, stream, control):
        with jax.named_scope("verify"), jax.named_scope("layer_0"):
            with jax.named_scope("attention"):
                coded = formats.decode_fp8(params["coded"], params["scale"], BLOCK).astype(jnp.bfloat16)
                y = jnp.einsum("tk,nk->tn", control["x"], coded, preferred_element_type=jnp.float32)
                mixed = y[:, :4]
                if pieces.trips:
                    mixed = jax.lax.fori_loop(
                        0, pieces.trips, lambda _, c: c / jnp.sum(c, axis=1, keepdims=True), mixed
                    )
            with jax.named_scope("ffn"):
                y = jnp.einsum(
                    "tn,mn->tm", y.astype(jnp.bfloat16), params["plain"], preferred_element_type=jnp.float32
                )
                for _ in range(TRITON_CALLS if pieces.triton else 0):
                    shape = jax.ShapeDtypeStruct((CACHE[1],), jnp.float32)
                    doubled = launch.call(
                        doubling_kernel, y[0, : CACHE[1]], grid=(1,), outputs=[shape], n=CACHE[1]
                    )[0]
                    y = y.at[0, : CACHE[1]].set(doubled)
        with jax.named_scope("reject"):
            y = jax.lax.cond(
                control["flag"], lambda y: jnp.cumsum(jnp.sort(y, axis=0), axis=1), lambda y: y, y
            )
        with jax.named_scope("commit"):
            cache = jax.lax.dynamic_update_slice_in_dim(stream["cache"], y[:, : CACHE[1]], control["at"], 0)
        return {"cache": cache}, (mixed, jnp.sum(y))

    return step


def arguments() -> tuple[dict, dict, dict]:
    abstract = jax.ShapeDtypeStruct
    params = {
        "coded": abstract((OUT, WIDTH), jnp.float8_e4m3fn),
        "scale": abstract((OUT // BLOCK, WIDTH // BLOCK), jnp.uint8),
        "plain": abstract((WIDTH, OUT), jnp.bfloat16),
        "unused": abstract((3,), jnp.float32),
    }
    control = {
        "x": abstract((ROWS, WIDTH), jnp.bfloat16),
        "flag": abstract((), jnp.bool_),
        "at": abstract((), jnp.int32),
    }
    return params, {"cache": abstract(CACHE, jnp.float32)}, control


@pytest.fixture(scope="session")
def compiled():
    """`compiled("h200", trips=9)`: the program with those pieces, compiled once per session."""

    @functools.cache
    def make(target: str, **pieces) -> Compiled:
        chosen = Pieces(**pieces)
        donated = 1 if chosen.donated else ()
        return deviceless.compile_for(targets.target(target), program(chosen), arguments(), donated)

    return make


@pytest.fixture(scope="session")
def state_bytes() -> int:
    return deviceless.tree_bytes(arguments()[1])
