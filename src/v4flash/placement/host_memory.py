"""The host's memory as a device reaches it.

Knows: the kinds of such memory, and how one is tried. Does not know: what is put there.
"""

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.errors import CapacityError, first_line

MEMORIES = ("pinned_host", "unpinned_host")  # the first can be read by a GPU while it works


def host_memory() -> jax.sharding.SingleDeviceSharding:
    """The host's memory as the default device reaches it. Raises CapacityError where it reaches none."""
    device = next(iter(jnp.zeros(()).devices()))
    refused = "it names none"
    for kind in MEMORIES:
        try:
            sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
            jax.block_until_ready(jax.device_put(np.zeros((1,), np.uint8), sharding))
        except (ValueError, RuntimeError) as error:
            refused = first_line(error)
            continue
        return sharding
    raise CapacityError(
        f"--experts host: {device.device_kind} reaches no memory of the host ({refused}); use --experts resident, peer "
        "or sidecar"
    )
