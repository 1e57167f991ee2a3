"""Where JAX runs when nobody says: never on a GPU whose driver is not there, and without a word about it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import v4flash
from v4flash.cli import device, main
from v4flash.errors import CapacityError

REPOSITORY = Path(v4flash.__file__).resolve().parents[2]
# In a process that has no driver, whatever this machine has.
ASK_JAX = """
from v4flash.cli import device
device._DRIVER_FILES, device._DRIVER_LIBRARY = (), "libabsent.so.1"
device.default_platform()
import jax
print(jax.devices()[0].platform)
"""


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """`driver(True)`: this machine has an NVIDIA driver, whatever it really has; and JAX_PLATFORMS is not set."""
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(device, "_DRIVER_LIBRARY", "libabsent.so.1")

    def pretend(present: bool) -> None:
        file = tmp_path / "nvidiactl"
        if present:
            file.touch()
        monkeypatch.setattr(device, "_DRIVER_FILES", (file,))

    return pretend


@pytest.mark.parametrize(("present", "given", "expected"), [
    (False, None, "cpu"),
    (False, "", "cpu"),
    (False, "cuda", "cuda"),
    (True, None, None),
    (True, "cpu", "cpu"),
])  # fmt: skip
def test_platform_is_chosen_only_where_nobody_chose(driver, monkeypatch, present, given, expected):
    driver(present)
    if given is not None:
        monkeypatch.setenv("JAX_PLATFORMS", given)
    device.default_platform()
    assert os.environ.get("JAX_PLATFORMS") == expected


def test_every_command_line_chooses_first(driver, capsys):
    driver(False)
    assert main(["--help"]) == 0
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_the_library_alone_is_a_driver_too(driver, monkeypatch):
    driver(False)
    assert not device.has_nvidia_driver()
    monkeypatch.setattr(device, "_DRIVER_LIBRARY", None)  # dlopen of nothing is the process itself
    assert device.has_nvidia_driver()


def test_a_gpu_without_driver_is_refused_before_jax_starts(driver):
    driver(False)
    with pytest.raises(CapacityError, match="no NVIDIA driver .*nvidiactl.*pip install"):
        device.choose("gpu")
    assert "JAX_PLATFORMS" not in os.environ


def without_platform() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "V4FLASH_"))}


def test_nothing_is_printed_on_a_machine_without_driver():
    """The CUDA plugin, present for compiling, complains about missing libraries if it is asked to run."""
    found = subprocess.run(
        [sys.executable, "-c", ASK_JAX], capture_output=True, text=True, env=without_platform()
    )
    assert (found.stdout, found.stderr) == ("cpu\n", "")


@pytest.mark.parametrize("entry", [["run_decode.py"], ["-m", "v4flash", "decode"]], ids=["script", "module"])
def test_both_entries_start_jax_quietly(checkpoint, entry):
    """The prompt does not fit, which is found out after JAX has started: that sentence is all there is."""
    command = [
        sys.executable,
        *entry,
        "--ckpt",
        str(checkpoint),
        "--prompt",
        "hello",
        "--ctx",
        "2",
        "--quiet",
    ]
    found = subprocess.run(command, capture_output=True, text=True, env=without_platform(), cwd=REPOSITORY)
    assert (found.returncode, found.stdout) == (4, "")
    assert found.stderr.startswith("v4flash: prompt has ") and found.stderr.count("\n") == 1
