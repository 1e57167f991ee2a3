"""How XLA is asked to compile the pinned programs.

Knows: options of the GPU compiler that keep a step one captured graph. Does not know: programs.
"""

import jax

# Loops belong to the captured graph as branches do, and so does what stands alone between them: whatever is left
# out is launched by the host, which waits for the device to learn where a loop ends.
_CAPTURED = (
    "FUSION",
    "CUBLAS",
    "CUBLASLT",
    "CUSTOM_CALL",
    "CUDNN",
    "DYNAMIC_SLICE_FUSION",
    "CONDITIONAL",
    "WHILE",
)
GPU_OPTIONS = {"xla_gpu_enable_command_buffer": ",".join(_CAPTURED), "xla_gpu_graph_min_graph_size": 1}


# Without a limit that arguments in the host's memory would seem to exceed: beyond it values are computed twice.
_WITH_HOST_MEMORY = {"xla_disable_hlo_passes": "rematerialization"}


def of(platform: str, *, host_memory: bool = False) -> dict[str, str | int]:
    """The options for devices of a platform, as JAX names it; `host_memory`: some arguments lie in the host's."""
    if platform != "gpu":
        return {}
    return GPU_OPTIONS | (_WITH_HOST_MEMORY if host_memory else {})


def here(*, host_memory: bool = False) -> dict[str, str | int]:
    """The options for the default device."""
    return of(jax.default_backend(), host_memory=host_memory)
