"""Many small arrays in one: a step is dispatched with one argument for each array, and each costs host time.

Knows: how arrays lie one behind the other and are read back as slices, which a kernel gets as a pointer with an offset.
Does not know: what they are.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

_ALIGNMENT = 256  # bytes, so that every piece starts where 16-byte loads may


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arena:
    """Arrays of one type by name.

    Attributes:
      data: [total], all of them with gaps that keep them aligned.
      layout: (name, first element, shape) of each.
    """

    data: jax.Array
    layout: tuple[tuple[str, int, tuple[int, ...]], ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def pack(cls, arrays: Mapping[str, jax.Array], dtype) -> "Arena":
        """One arena of `arrays`, converted to `dtype`."""
        step = _ALIGNMENT // jnp.dtype(dtype).itemsize
        parts, layout, place = [], [], 0
        for name, array in arrays.items():
            layout.append((name, place, tuple(array.shape)))
            size = -(-array.size // step) * step
            parts.append(jnp.pad(array.astype(dtype).reshape(-1), (0, size - array.size)))
            place += size
        data = jnp.concatenate(parts) if parts else jnp.zeros((0,), dtype)
        return cls(data, tuple(layout))

    def __contains__(self, name: str) -> bool:
        return any(own == name for own, _, _ in self.layout)

    def __getitem__(self, name: str) -> jax.Array:
        place, shape = self._find(name)
        return jax.lax.slice_in_dim(self.data, place, place + math.prod(shape)).reshape(shape)

    def with_gap(self, name: str) -> jax.Array:
        """An array [n] together with the gap behind it, for readers that know how much of it to read.

        XLA hands a slice of whole alignment steps to a kernel as an address, and copies a shorter one.
        """
        place, shape = self._find(name)
        step = _ALIGNMENT // self.data.dtype.itemsize
        return jax.lax.slice_in_dim(self.data, place, place + -(-math.prod(shape) // step) * step)

    def _find(self, name: str) -> tuple[int, tuple[int, ...]]:
        for own, place, shape in self.layout:
            if own == name:
                return place, shape
        raise KeyError(name)
