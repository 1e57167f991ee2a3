"""`v4flash logits` against other implementations of both families.

Exact mode is compared with transformers (V4) and DeepSeek's own code (V4.1) in float32.
"""

import numpy as np
import pytest

# The oracles differ from one another by up to 2.6e-5 (V4) and 6.8e-5 (V4.1) through summation order alone;
# a wrong term shows as 1e-2 or more.
LOGITS = {"v4-tiny": 2e-4, "v41-tiny": 4e-4}
# Residual streams reach about 60, where two oracles differ by 8e-5.
STREAMS = 1e-3
# Simulated rounding flips with the last bit, so only rows that a disturbance of 5e-7 moves by less than this count.
STABLE_JITTER, STABLE_ROWS = 1e-3, 2e-3
CONTINUED = (33, 300)


@pytest.fixture(scope="module", params=LOGITS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def exact(family, command, golden, lengths):
    """Logits and streams of every golden prompt, and of two prompts with their greedy continuation."""
    numbers = golden(family, "golden")
    prompts = [numbers[f"L{n}.ids"] for n in lengths[family]]
    continued = [np.concatenate([numbers[f"L{n}.ids"], numbers[f"L{n}.greedy_ids"][:-1]]) for n in CONTINUED]
    found = command("logits", family, prompts + continued, "--mode", "exact", "--streams")
    assert len(found) == 2 * (len(prompts) + len(continued))
    return found


def test_last_positions_of_every_prompt(family, exact, golden, lengths):
    numbers = golden(family, "golden")
    for index, n in enumerate(lengths[family]):
        found = exact[f"logits.{index}"]
        assert found.shape[0] == n
        for kind in ("logits", "step_logits"):
            np.testing.assert_allclose(
                found[-4:], numbers[f"L{n}.{kind}"], rtol=0, atol=LOGITS[family], err_msg=f"{kind} of {n} ids"
            )


def test_greedy_continuation(family, exact, golden, lengths):
    numbers = golden(family, "golden")
    for index, n in enumerate(CONTINUED, len(lengths[family])):
        found = exact[f"logits.{index}"][n - 1 :]
        np.testing.assert_array_equal(found.argmax(axis=-1), numbers[f"L{n}.greedy_ids"])
        np.testing.assert_allclose(found, numbers[f"L{n}.greedy_logits"], rtol=0, atol=LOGITS[family])


def test_residual_streams_after_every_layer(family, exact, golden, lengths):
    found = exact[f"streams.{lengths[family].index(300)}"]
    np.testing.assert_allclose(
        found[:, -2:], golden(family, "golden")["L300.streams"], rtol=0, atol=STREAMS, err_msg="[L, N, S, D]"
    )


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 300])
def test_chunk_length_changes_nothing(family, command, golden, lengths, chunk):
    numbers = golden(family, "golden")
    found = command(
        "logits", family, [numbers[f"L{n}.ids"] for n in lengths[family]], "--mode", "exact", "--chunk", chunk
    )
    for index, n in enumerate(lengths[family]):
        np.testing.assert_allclose(
            found[f"logits.{index}"][-4:],
            numbers[f"L{n}.logits"],
            rtol=0,
            atol=LOGITS[family],
            err_msg=str(n),
        )


@pytest.mark.slow
def test_simulated_quantisation_where_it_is_stable(family, command, golden, lengths):
    numbers, quantised = golden(family, "golden"), golden(family, "qat")
    short = [n for n in lengths[family] if n <= 3]
    found = command("logits", family, [numbers[f"L{n}.ids"] for n in short])
    compared = 0
    for index, n in enumerate(short):
        stable = quantised[f"qat.L{n}.jitter"] < STABLE_JITTER
        difference = np.abs(found[f"logits.{index}"][-4:] - quantised[f"qat.L{n}.logits"]).max(axis=-1)
        assert (difference[stable] < STABLE_ROWS).all()
        compared += stable.sum()
    assert compared >= 1
