"""The head's bodies against their reference. Run by test_interpreted.py.

Triton's interpreter runs one, instruction by instruction; Pallas' interpreter runs the Mosaic one with its barriers,
copies and both warpgroups as threads, looks for races, and takes a tile's product as a whole: registers, swizzles and
wgmma's layouts are not in it.
"""

import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest

from pallas_kernels.head import fused, mosaic, reference

ptx_emulator.teach_interpreter()

BODIES = {"Triton": fused.logits_argmax, "Mosaic": mosaic.logits_argmax}

# float32 sums of the same products in another order.
SUM_TOLERANCE = 1e-5


def _case(tokens: int, width: int, dtype, seed: int = 0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(8, width)), jnp.float32).astype(dtype)
    return x, jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16)


@pytest.fixture(autouse=True)
def no_races(capfd):
    """The interpreter of Mosaic kernels prints a race and goes on."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("body", "tokens", "width", "dtype"),
    [
        ("Triton", 160, 256, jnp.float32),
        ("Triton", 32, 64, jnp.bfloat16),
        ("Triton", 96, 128, jnp.bfloat16),
        ("Triton", 64, 1088, jnp.bfloat16),
        ("Mosaic", 192, 256, jnp.float32),
        ("Mosaic", 64, 64, jnp.bfloat16),
        ("Mosaic", 64, 1088, jnp.bfloat16),
    ],
)
def test_logits_and_best_token(body, tokens, width, dtype):
    _compare(BODIES[body], *_case(tokens, width, dtype))


def test_programs_take_several_tiles(monkeypatch):
    """More chunks than slots, and programs that take three tiles and two."""
    monkeypatch.setattr(mosaic, "PROGRAMS", 2)
    _compare(mosaic.logits_argmax, *_case(320, 640, jnp.bfloat16))


def _compare(body, x, weight):
    token, logit, logits = body(x, weight, logits=True)
    best, height, full = reference.logits_argmax(x, weight, logits=True)
    tolerance = SUM_TOLERANCE * float(jnp.abs(full).max())
    np.testing.assert_allclose(logits, full, rtol=0, atol=tolerance)
    np.testing.assert_allclose(logit, height, rtol=0, atol=tolerance)
    assert token.tolist() == best.tolist()
    only_token, only_logit = body(x, weight)
    assert only_token.tolist() == token.tolist() and only_logit.tolist() == logit.tolist()


@pytest.mark.parametrize(("body", "programs"), [("Triton", 132), ("Mosaic", 132), ("Mosaic", 1)])
def test_ties_go_to_the_lowest_token(body, programs, monkeypatch):
    """Equal logits in one lane, in one tile, in different tiles and programs; zeros of both signs; all negative."""
    monkeypatch.setattr(mosaic, "PROGRAMS", programs)
    weight = np.zeros((128, 64), np.float32)
    weight[[20, 4, 70], 0] = 1  # rows 4 and 20 share a lane of the Triton body
    weight[[41, 75, 105], 1] = 2  # rows 41 and 105 share a lane of the Mosaic body
    weight[:, 2] = -1
    weight[[33, 34], 2] = -0.5
    weight[:, 3] = np.where(np.arange(128) % 2, 0.0, -0.0)
    x = np.zeros((8, 64), np.float32)
    x[0, 0] = x[1, 1] = x[2, 2] = x[3, 3] = 1
    x[4, 3] = -1
    x[5, [0, 1]] = 2, 1
    token, logit = BODIES[body](jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16))
    assert token.tolist() == [4, 41, 33, 0, 0, 4, 0, 0]
    assert logit.tolist() == [1, 2, -0.5, 0, 0, 2, 0, 0]


@pytest.mark.parametrize("body", BODIES)
def test_shapes_are_checked(body):
    with pytest.raises(ValueError, match=r"head is bfloat16 \(40, 64\)"):
        BODIES[body](jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((40, 64), jnp.bfloat16))


def test_rows_must_leave_shared_memory_for_the_ring():
    with pytest.raises(ValueError, match="float32 rows of width 4096 need 327680 bytes of shared memory"):
        mosaic.logits_argmax(jnp.zeros((8, 4096)), jnp.zeros((64, 4096), jnp.bfloat16))
