"""The committed golden data are the ones that were cut, and the checkpoints made from them load strictly."""

import golden
import golden_programs
import numpy as np
import pytest

# Printed by tests/support/cut_golden.py.
DIGESTS = {
    "formats.safetensors": "6bd8c3fd6308a90a31bde0ca792c25efa9bc801da03446185d2fa28ed80e2c54",
    "pieces.safetensors": "504b3bceef208b64852cff7d4d0fd3a070e250c06546b3396eccb431cb38fc0a",
    "v4-tiny.xz": "0762e8e6bd41642636f5ebd805af29ba850049a69f3870fd5b9df7f2c283333b",
    "v41-tiny.xz": "6d743b435db2fa9b67ff4d901a74d985a2e63492c7692afead760e0b6c0f7600",
    "v4-tiny/config.json": "a72ebb8df09ad3002fb996b4425448c19fdec395ed6741263cdff1a5f5d74912",
    "v41-tiny/config.json": "a1453bd9607910da79727f00c7a39e753de5920f4e661dcab2d82bcf00f9a54d",
    "v41-tiny/engram_token_map.json": "8bc2aa3082499b8283057192dfd820614a8e179d44ae6bcd7ab6c07b4f894132",
}
LARGEST_BYTES = 11_500_000


def test_every_file_is_the_one_that_was_cut():
    assert golden.digests() == DIGESTS
    assert sum((golden.CUT / file).stat().st_size for file in DIGESTS) <= LARGEST_BYTES


@pytest.mark.parametrize("name", golden.NAMES)
def test_a_checkpoint_made_from_the_cut_loads(name, tmp_path):
    path = golden.rebuild(name, tmp_path / name)
    embed = np.asarray(golden_programs.loaded(path, False).model.backbone.embed[...])
    kept = golden.packed(name)[golden.VOCABULARY].array
    assert np.flatnonzero(embed.any(axis=1)).tolist() == kept.tolist()
