"""How XLA is asked to compile the pinned programs.

Knows: options of the GPU compiler that keep a step one captured graph, and when control flow may not be part of one.
Does not know: programs.
"""

import jax
from jaxlib.mlir import ir

_CAPTURED = ("FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN", "DYNAMIC_SLICE_FUSION")
# Branches belong to the captured graph, and so does what stands alone between them: whatever is left out is launched by
# the host, which waits for the device to learn which branch is taken. Not so where a program has loops: the driver's
# scheduler of conditional nodes (580.159) sometimes never comes back from a loop inside a branch.
_BRANCHES = ("CONDITIONAL",)
_LOOP = "stablehlo.while"

# Without a limit that arguments in the host's memory would seem to exceed: beyond it values are computed twice.
_WITH_HOST_MEMORY = {"xla_disable_hlo_passes": "rematerialization"}
# Launches wait for those alone whose memory they read or write.
_BESIDE_EACH_OTHER = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


def of(
    lowered: jax.stages.Lowered,
    platform: str,
    *,
    host_memory: bool = False,
    beside_each_other: bool = False,
) -> dict[str, str | int]:
    """The options for a program and devices of a platform, as JAX names it.

    Args: host_memory, whether some arguments lie in the host's; beside_each_other, whether launches that do not depend
    on one another run at the same time.
    """
    if platform != "gpu":
        return {}
    captured = _CAPTURED if _has_loops(lowered) else _CAPTURED + _BRANCHES
    options = {"xla_gpu_enable_command_buffer": ",".join(captured), "xla_gpu_graph_min_graph_size": 1}
    options |= _WITH_HOST_MEMORY if host_memory else {}
    return options | (_BESIDE_EACH_OTHER if beside_each_other else {})


def here(lowered: jax.stages.Lowered, **options: bool) -> dict[str, str | int]:
    """The options for a program on the default device; as `of`."""
    return of(lowered, jax.default_backend(), **options)


def _has_loops(lowered: jax.stages.Lowered) -> bool:
    found = []

    def look(operation: ir.Operation) -> ir.WalkResult:
        if operation.name != _LOOP:
            return ir.WalkResult.ADVANCE
        found.append(operation.name)
        return ir.WalkResult.INTERRUPT

    lowered.compiler_ir("stablehlo").operation.walk(look)
    return bool(found)
