"""What the assembler says of PTX."""

import pytest

from v4flash.errors import V4FlashError
from v4flash.profile import triton_binaries

HEAD = ".version 8.4\n.target sm_90a\n.address_size 64\n"
# 256 live values of 4 bytes, all loaded before any is stored: they do not fit 64 registers.
SPILLING = (
    HEAD
    + ".visible .entry crowded(.param .u64 p)\n.maxntid 1024\n{\n.reg .b64 %rd1;\n.reg .f32 %f<256>;\n"
    + "ld.param.u64 %rd1, [p];\n"
    + "".join(f"ld.volatile.global.f32 %f{i}, [%rd1+{4 * i}];\n" for i in range(256))
    + "bar.sync 0;\n"
    + "".join(f"st.volatile.global.f32 [%rd1+{4 * i}], %f{255 - i};\n" for i in range(256))
    + "ret;\n}\n"
)


def test_spills_are_seen():
    (binary,) = triton_binaries.assembled([SPILLING, SPILLING])
    assert binary.name == "crowded"
    assert binary.spilled > 0
    assert binary.registers <= 64


def test_refused_assembly_names_the_kernel():
    broken = SPILLING.replace("ret;", "retire;")
    with pytest.raises(V4FlashError, match="refuses the Triton kernel crowded"):
        triton_binaries.assembled([broken])
