"""Where a command runs, decided before JAX decides by itself.

Knows: JAX's platform switch and what an absent GPU means to a person. Does not know: models.
"""

import ctypes
import dataclasses
import os
import resource
import sys
from pathlib import Path

from v4flash.errors import CapacityError

_PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}
_INSTALL_HINT = "install the GPU libraries with: pip install -c constraints.txt -e '.[gpu]'"
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"))
_DRIVER_LIBRARY = "libcuda.so.1"


@dataclasses.dataclass(frozen=True)
class Device:
    """The device in use: JAX's platform name and kind, and a remark that a person should see."""

    platform: str
    kind: str
    remark: str | None = None

    def __str__(self) -> str:
        return self.platform if self.kind in ("", self.platform) else f"{self.platform} ({self.kind})"


def has_nvidia_driver() -> bool:
    """Whether this machine has an NVIDIA driver: its device files, or the library that talks to it."""
    if any(file.exists() for file in _DRIVER_FILES):
        return True
    try:
        ctypes.CDLL(_DRIVER_LIBRARY)
    except OSError:
        return False
    return True


def default_platform() -> None:
    """Sets JAX_PLATFORMS=cpu where there is no NVIDIA driver and the user set nothing; call before JAX starts.

    With the CUDA plugin installed (for compiling) and no driver, JAX would begin every run with a traceback.
    """
    if not os.environ.get("JAX_PLATFORMS") and not has_nvidia_driver():
        os.environ["JAX_PLATFORMS"] = "cpu"


def choose(wanted: str | None) -> Device:
    """Starts JAX on the wanted device ('cpu', 'gpu', or None for JAX's own choice).

    Raises CapacityError when a GPU is asked for and none can be used, or when JAX finds no device at all.
    """
    if wanted == "gpu" and not has_nvidia_driver():
        raise CapacityError(
            f"--device gpu: this machine has no NVIDIA driver (no {_DRIVER_FILES[0]}, no {_DRIVER_LIBRARY}); "
            f"leave the option out, or on a machine with one {_INSTALL_HINT}"
        )
    if wanted:
        os.environ["JAX_PLATFORMS"] = _PLATFORMS[wanted]
    import jax

    if wanted:
        # Where jax was imported before, it has read the variable already.
        jax.config.update("jax_platforms", _PLATFORMS[wanted])
    asked = os.environ.get("JAX_PLATFORMS")
    try:
        device = jax.devices(wanted)[0] if wanted else jax.devices()[0]
    except (RuntimeError, IndexError, AssertionError) as error:
        # Without a plugin for the platform, JAX 0.11 fails an assertion that has no message.
        reason = (str(error).splitlines() or ["no plugin for this platform"])[0]
        if wanted == "gpu":
            raise CapacityError(f"--device gpu: JAX finds no GPU ({reason}); {_INSTALL_HINT}") from None
        because = f"JAX_PLATFORMS={asked}" if asked else "no device"
        raise CapacityError(
            f"{because}: JAX cannot start ({reason}); unset it, or pass --device cpu"
        ) from None
    jax.config.update("jax_default_device", device if wanted else None)
    remark = None
    if device.platform == "cpu" and wanted is None and not asked and has_nvidia_driver():
        remark = f"this machine has an NVIDIA driver, but JAX runs on the CPU; {_INSTALL_HINT}"
    return Device(device.platform, device.device_kind, remark)


def peak_bytes() -> int:
    """The most memory in use so far: the device's if it counts that, else the process's."""
    import jax

    figures = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in figures:
        return int(figures["peak_bytes_in_use"])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
