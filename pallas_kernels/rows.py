"""What the operations around attention share in plain jax.numpy: unsummed products, norms and rotations of rows.

Knows: how a product is handed over before its split-K partials are summed, and the small formulas of a row. Does
not know: any operation.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Columns:
    """Some columns of a product that is still in parts.

    Attributes:
      partials: float32 [S, R, N], to be summed over S in order; several products may lie side by side in N.
      first, width: the columns first .. first + width - 1 are meant.
    """

    partials: jax.Array
    first: int = dataclasses.field(metadata={"static": True})
    width: int = dataclasses.field(metadata={"static": True})

    def __post_init__(self):
        if isinstance(self.partials, jax.Array) and self.first + self.width > self.partials.shape[2]:
            raise ValueError(
                f"columns {self.first} to {self.first + self.width - 1} of a product with {self.partials.shape[2]}"
            )

    @property
    def rows(self) -> int:
        return self.partials.shape[1]

    @property
    def layout(self) -> tuple[int, int, int]:
        """(splits, columns of the whole product, first column), as kernels take it."""
        return self.partials.shape[0], self.partials.shape[2], self.first

    def summed(self) -> jax.Array:
        """The finished product, float32 [R, width]."""
        total = self.partials[0]
        for part in self.partials[1:]:
            total = total + part
        return total[:, self.first : self.first + self.width]


def whole(product: jax.Array) -> Columns:
    """A finished product [R, N] as Columns."""
    return Columns(product.astype(jnp.float32)[None], 0, product.shape[1])


def turn_table(positions: jax.Array, frequencies) -> jax.Array:
    """Cosine and sine of position * frequency: float32 [T, 2, P] for positions int32 [T], frequencies [P]."""
    angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)


def turn(x: jax.Array, table: jax.Array, *, inverse: bool = False) -> jax.Array:
    """x [T, ..., d] with its last 2 P columns rotated as adjacent (even, odd) pairs, by table [T, 2, P]."""
    dims = 2 * table.shape[2]
    cos, sin = (table[:, i].reshape(x.shape[0], *[1] * (x.ndim - 2), -1) for i in range(2))
    sin = -sin if inverse else sin
    kept, turned = x[..., :-dims], x[..., -dims:].astype(jnp.float32)
    even, odd = turned[..., 0::2], turned[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(turned.shape)
    return jnp.concatenate([kept, turned.astype(x.dtype)], axis=-1)


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32, returned in x's type."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.maximum(mean + eps, jnp.finfo(jnp.float32).tiny))
    return (wide if weight is None else wide * weight.astype(jnp.float32)).astype(x.dtype)
