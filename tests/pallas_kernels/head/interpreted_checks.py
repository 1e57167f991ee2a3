"""The head's kernels, instruction by instruction, against their reference. Run by test_interpreted.py."""

import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest

from pallas_kernels.head import fused, reference

ptx_emulator.teach_interpreter()

# float32 sums of the same products in another order.
SUM_TOLERANCE = 1e-5


def _case(tokens: int, width: int, dtype, seed: int = 0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(8, width)), jnp.float32).astype(dtype)
    return x, jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16)


@pytest.mark.parametrize(
    ("tokens", "width", "dtype"),
    [(160, 256, jnp.float32), (32, 64, jnp.bfloat16), (96, 128, jnp.bfloat16), (64, 1088, jnp.bfloat16)],
)
def test_logits_and_best_token(tokens, width, dtype):
    x, weight = _case(tokens, width, dtype)
    token, logit, logits = fused.logits_argmax(x, weight, logits=True)
    best, height, full = reference.logits_argmax(x, weight, logits=True)
    tolerance = SUM_TOLERANCE * float(jnp.abs(full).max())
    np.testing.assert_allclose(logits, full, rtol=0, atol=tolerance)
    np.testing.assert_allclose(logit, height, rtol=0, atol=tolerance)
    assert token.tolist() == best.tolist()
    only_token, only_logit = fused.logits_argmax(x, weight)
    assert only_token.tolist() == token.tolist() and only_logit.tolist() == logit.tolist()


def test_ties_go_to_the_lowest_token():
    """Equal logits in one lane, in one tile and in different tiles; zeros of both signs; all negative."""
    weight = np.zeros((96, 64), np.float32)
    weight[[20, 4, 70], 0] = 1  # rows 4 and 20 share a lane
    weight[[41, 75], 1] = 2
    weight[:, 2] = -1
    weight[[33, 34], 2] = -0.5
    weight[:, 3] = np.where(np.arange(96) % 2, 0.0, -0.0)
    x = np.zeros((8, 64), np.float32)
    x[0, 0] = x[1, 1] = x[2, 2] = x[3, 3] = 1
    x[4, 3] = -1
    x[5, [0, 1]] = 2, 1
    token, logit = fused.logits_argmax(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16))
    assert token.tolist() == [4, 41, 33, 0, 0, 4, 0, 0]
    assert logit.tolist() == [1, 2, -0.5, 0, 0, 2, 0, 0]


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"head is bfloat16 \(40, 64\)"):
        fused.logits_argmax(jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((40, 64), jnp.bfloat16))
