"""The Mosaic body compiles for the H200 that is not here, at real shapes: two launches in one graph, no spills."""

import re

import pytest

from pallas_kernels.head import mosaic
from pallas_kernels.head.specs import SPECS
from v4flash.profile import deviceless, targets

NAMES = ("v4-flash", "v4.1-flash", "demo")
# Two warpgroups, each with the accumulators and best tokens of 64 x 8 logits: a fraction of what a thread may have.
MOST_REGISTERS = 64


@pytest.mark.parametrize("name", NAMES)
def test_mosaic_body(name, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    spec = SPECS[name]
    made = deviceless.compile_for(
        targets.target("h200"),
        lambda x, weight: mosaic.logits_argmax(x, weight, logits=True),
        (spec.input(), spec.weight()),
    )
    assert "kCommandBuffer" in made.thunks
    assert len(re.findall(r"kCustomCall +\[", made.thunks)) == 1
    assert len(re.findall(r"kCustomKernel +\[[^]]*\] winners", made.thunks)) == 1
    told = "".join(capfd.readouterr())
    assert "streamed_winners" in told and "for 'sm_90a'" in told
    assert max(int(count) for count in re.findall(r"Used (\d+) registers", told)) <= MOST_REGISTERS
    assert {int(count) for count in re.findall(r"(\d+) bytes spill", told)} == {0}
