"""Does a model on packed weights compute what the plain modules do in float32? Block by block, and as a law of tokens.

Knows: what is compared, and what difference is too much. Does not know: how the models were opened (gate_sides), or how
a record is shown (cli/kernel_gate).

Rounded activations make a model jumpy: one rounding that falls to the other side moves everything behind it. So no
fixed number says how far two right computations may be apart. The yardstick is the model's own noise on the same texts:
the plain modules against themselves with every embedded number moved by about one rounding of what fused launches hand
on, or, for a bfloat16 model, computed in bfloat16. A model may be MARGIN times as far from the reference as that.

Texts are prompts with what the reference says behind them, greedily. Both models read the same texts, so that a greedy
text differs exactly where a token that was said is not the likeliest any more.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

SCHEMA = "v4flash.kernels.gate/1"
# Noise enters once, in front of the first layer, while fused launches hand rounded numbers on in every layer; and the
# noise is itself measured on a few hundred positions. Divergences of laws grow with the square of an error.
MARGIN = 4.0
FLIP_FLOOR = 0.01  # of the positions: this many flips of the likeliest token say nothing yet
FIRST = 5  # tokens of a position whose logits are looked at


@dataclasses.dataclass(frozen=True)
class Floors:
    """What is allowed beside the noise: relative errors behind a layer, and nats."""

    layer: float
    law: float


# Sums of float32 in another order, through a stack of layers. Where activations are rounded, a few of the millions of
# roundings of the texts fall to the other side, in one run and not in the other: the noise may have none in a layer.
UNROUNDED, ROUNDED = Floors(1e-5, 1e-8), Floors(2e-3, 1e-5)


@dataclasses.dataclass(frozen=True)
class Output:
    """What one model computes for N tokens: logits [N, V] and the streams [L, N, S, D] behind every layer, float32."""

    logits: np.ndarray
    streams: np.ndarray


@dataclasses.dataclass(frozen=True)
class Text:
    """Token ids, of which those from `said` on were the reference's greedy choices."""

    ids: tuple[int, ...]
    said: int


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far one model's outputs are from the reference's.

    Attributes:
      layers: ||streams - reference|| / ||reference|| behind each layer, over all positions.
      divergence: mean KL divergence of the next token's law from the reference's, in nats.
      worst: the largest of them.
      flips: share of positions whose likeliest token is another.
      shift: the largest change of a logit among the reference's FIRST likeliest tokens of a position.
      texts: for each text the first generated token that is another: its index and how far apart the reference has
        the logits of both; None where the text is the same.
    """

    layers: tuple[float, ...]
    divergence: float
    worst: float
    flips: float
    shift: float
    texts: tuple[tuple[int, float] | None, ...]


def distance(texts: Sequence[Text], found: Sequence[Output], reference: Sequence[Output]) -> Distance:
    """Compares one model's outputs for some texts with the reference's."""
    ours, theirs = (np.concatenate([output.logits for output in side]) for side in (found, reference))
    divergences = kl_divergence(theirs, ours)
    likely = np.argsort(-theirs, axis=1, kind="stable")[:, :FIRST]
    moved = np.take_along_axis(ours, likely, 1).astype(np.float64) - np.take_along_axis(theirs, likely, 1)
    return Distance(
        _layer_errors(found, reference),
        float(divergences.mean()),
        float(divergences.max()),
        float(np.mean(ours.argmax(1) != theirs.argmax(1))),
        float(np.abs(moved).max()),
        tuple(map(first_other_token, texts, found, reference)),
    )


def kl_divergence(reference: np.ndarray, found: np.ndarray) -> np.ndarray:
    """KL(reference || found) [N] of the laws of logits [N, V], in nats; infinite where `found` is not finite."""
    first, second = (_log_law(logits.astype(np.float64)) for logits in (reference, found))
    divergence = np.sum(np.exp(first) * (first - second), axis=1)
    return np.where(np.isfinite(divergence), np.maximum(divergence, 0), np.inf)


def _log_law(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _layer_errors(found: Sequence[Output], reference: Sequence[Output]) -> tuple[float, ...]:
    errors = []
    for layer in range(len(reference[0].streams)):
        ours, theirs = (
            np.concatenate([output.streams[layer].astype(np.float64).ravel() for output in side])
            for side in (found, reference)
        )
        error = float(np.linalg.norm(ours - theirs) / max(np.linalg.norm(theirs), np.finfo(np.float64).tiny))
        errors.append(error if np.isfinite(error) else float("inf"))
    return tuple(errors)


def first_other_token(text: Text, found: Output, reference: Output) -> tuple[int, float] | None:
    """The first generated token that would have been another, counted from 0, and the reference's gap between both."""
    for place in range(text.said, len(text.ids)):
        own, row = int(found.logits[place - 1].argmax()), reference.logits[place - 1]
        if own != text.ids[place]:
            return place - text.said, float(row[text.ids[place]] - row[own])
    return None


def problems(found: Distance, noise: Distance, floors: Floors) -> list[str]:
    """What is more than MARGIN times the noise, one sentence each; empty where nothing is."""
    said = []
    for layer, (error, own) in enumerate(zip(found.layers, noise.layers, strict=True)):
        if not error <= MARGIN * own + floors.layer:
            said.append(f"layer {layer}: relative error {error:.1e}, noise {own:.1e}")
            break  # everything behind it inherits the error
    if not found.divergence <= MARGIN**2 * noise.divergence + floors.law:
        said.append(f"law of the next token: divergence {found.divergence:.1e}, noise {noise.divergence:.1e}")
    if not found.flips <= MARGIN * noise.flips + FLIP_FLOOR:
        said.append(f"likeliest token: {100 * found.flips:.1f} % flipped, noise {100 * noise.flips:.1f} %")
    for text, other in enumerate(found.texts):
        # Either of two logits may move by so much.
        if other is not None and not other[1] <= 2 * MARGIN * noise.shift:
            said.append(
                f"text {text} is another from token {other[0]} on: their logits are {other[1]:.2g} apart, and noise "
                f"moves one by {noise.shift:.2g}"
            )
    return said


def run(
    sides: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    rounded: bool,
    say: Callable[[str], Any],
) -> dict[str, Any]:
    """Compares `sides["fused"]` and `sides["noise"]` with `sides["reference"]` (gate_sides.Side each).

    Args: prompts, token ids each; tokens, how many the reference says behind each; rounded, whether the models round
    activations.
    Returns the part of the record that the models decide, JSON-ready: `right`, `problems`, `fused` and `noise`.
    """
    texts, outputs = [], {name: [] for name in sides}
    for number, prompt in enumerate(prompts):
        say(f"text {number + 1} of {len(prompts)}")
        said = sides["reference"].greedy(prompt, tokens)
        texts.append(Text((*prompt, *said), len(prompt)))
        for name, side in sides.items():
            outputs[name].append(side.read(texts[-1].ids))
    found, noise = (distance(texts, outputs[name], outputs["reference"]) for name in ("fused", "noise"))
    wrong = problems(found, noise, ROUNDED if rounded else UNROUNDED)
    return {
        "right": not wrong,
        "problems": wrong,
        "positions": sum(len(text.ids) for text in texts),
        "texts": len(texts),
        "tokens": tokens,
        "margin": MARGIN,
        "fused": _json(found),
        "noise": _json(noise),
    }


def _json(found: Distance) -> dict[str, Any]:
    """Numbers that are not finite become None."""
    return {
        "layers": [_finite(error) for error in found.layers],
        "divergence": _finite(found.divergence),
        "worst": _finite(found.worst),
        "flips": found.flips,
        "shift": _finite(found.shift),
        "texts": [None if other is None else [other[0], _finite(other[1])] for other in found.texts],
    }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
