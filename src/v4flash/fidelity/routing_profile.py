"""Which experts a model chooses over texts that a person gives: statistics to keep, and figures to read.

Knows: which files are texts, how long ones are cut, which half of them decides and which judges. Does not know: how
experts are chosen (model_routes.py), the file of counts (placement/statistics.py), or printing.

Counts are worth what their texts are worth: a pass over zeros or random ids sends every row to the same few experts or
to all alike. So there is no way in but text.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from v4flash.config import ModelConfig
from v4flash.errors import UsageError
from v4flash.placement import statistics
from v4flash.placement.prediction import Predictions
from v4flash.placement.statistics import DECIDE, JUDGE, Counts, RoutingStatistics, Text

SCHEMA = "v4flash.expert_profile/1"
MEASURED = "measured"
_EIGHTHS = (2, 4, 5, 6, 7)  # of the experts, as hot ones to report


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A text and where it came from: name, sha256 of its bytes, content."""

    name: str
    digest: str
    content: str


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was counted, and how well cold experts could have been foreseen (`Predictions.to_json`)."""

    statistics: RoutingStatistics
    rows: int
    hot: tuple[int, ...]
    predictions: list[dict[str, Any]]


def read_texts(files: Sequence[str]) -> list[TextFile]:
    """The texts in these files. Raises UsageError for a file that is none, is empty, or was given twice."""
    found: dict[str, TextFile] = {}
    for name in files:
        path = Path(name).expanduser()
        try:
            content = path.read_bytes()
            text = content.decode("utf-8")
        except OSError as error:
            raise UsageError(f"cannot read {path} ({error.strerror}); give a file of text") from None
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not valid UTF-8 (byte {error.start}); save it as UTF-8") from None
        if not any(character.isprintable() and not character.isspace() for character in text):
            raise UsageError(
                f"{path} holds no text, and counts of anything else say nothing; give a file of text"
            )
        digest = statistics.digest(content)
        if digest in found:
            raise UsageError(f"{path} is the same text as {found[digest].name}; give each text once")
        found[digest] = TextFile(path.name, digest, text)
    return list(found.values())


def hot_counts(config: ModelConfig) -> tuple[int, ...]:
    """Numbers of hot experts a layer to report where nobody asked for others."""
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    return tuple(sorted({max(experts * eighths // 8, chosen) for eighths in _EIGHTHS}))


def profile(
    texts: Sequence[TextFile],
    encode: Callable[[str], list[int]],
    routes: Callable[[Sequence[int]], np.ndarray],
    config: ModelConfig,
    weights: str,
    *,
    context: int,
    rows: int,
    hot: tuple[int, ...],
    say: Callable[[str], Any] = lambda sentence: None,
) -> Profile:
    """Counts the experts chosen over the texts.

    Args:
      encode: text -> its ids, a begin token first.
      routes: at most `context` ids -> expert ids [L, N, K] of their rows, nothing else among them.
      weights: fingerprint of the weights.
      rows: of a step, for the guesses at cold experts.
      hot: numbers of hot experts a layer.

    A text longer than the context is cut, and the begin token stands in front of every piece. Raises UsageError for a
    text of one token over and over.
    """
    encoded = [encode(text.content) for text in texts]
    for text, ids in zip(texts, encoded, strict=True):
        if len(set(ids[1:])) < 2:
            raise UsageError(f"{text.name} is one token over and over, which is no text; give another file")
    pieces = [_pieces(ids, context) for ids in encoded]
    halves = statistics.halves([sum(map(len, parts)) for parts in pieces])
    judging = JUDGE if JUDGE in halves else DECIDE
    sizes = config.num_hidden_layers, config.n_routed_experts
    counts = dict.fromkeys(halves, Counts.empty(*sizes))
    kept, counted = [], []
    for number, (text, parts, half) in enumerate(zip(texts, pieces, halves, strict=True), 1):
        say(f"text {number} of {len(texts)}")
        for ids in parts:
            found = routes(ids).astype(np.uint16)
            counts[half] += Counts.of(found, sizes[1])
            if half == judging:
                kept.append((np.asarray(ids), found))
        counted.append(Text(text.name, text.digest, sum(map(len, parts)), half))
    made = RoutingStatistics(
        statistics.identity(config), weights, tuple(counted), counts[DECIDE], counts.get(JUDGE)
    )
    hashed = np.asarray([layer.hash_routed for layer in config.layers])
    predictions = Predictions({count: made.hot(count) for count in (0, *hot)}, rows, hashed)
    for number, (ids, found) in enumerate(kept, 1):
        say(f"guessing, piece {number} of {len(kept)}")
        predictions.add(ids, found)
    return Profile(made, rows, hot, predictions.to_json())


def _pieces(ids: list[int], context: int) -> list[list[int]]:
    begin, *rest = ids
    return [[begin, *rest[start : start + context - 1]] for start in range(0, len(rest), context - 1)]


def figures(found: Profile) -> dict[str, Any]:
    """The profile as JSON. Shares and experts are measured; `out` is None where no second text judged."""
    made, rows = found.statistics, found.rows
    return {
        "schema": SCHEMA,
        "model": made.model,
        "weights": made.weights,
        "label": MEASURED,
        "texts": [dataclasses.asdict(text) for text in made.texts],
        "rows": _both(made, lambda counts: counts.rows),
        "step_rows": rows,
        "distinct_experts": _both(made, lambda counts: _distinct(counts, rows)),
        "hot": [_served(made, count, rows) for count in found.hot],
        "popularity": _both(made, lambda counts: _by_rank(made, counts)),
        "predictions": found.predictions,
    }


def _served(made: RoutingStatistics, count: int, rows: int) -> dict[str, Any]:
    """What `count` hot experts a layer serve, and how many cold ones a step meets in a layer."""
    hot = made.hot(count)
    return {
        "hot": count,
        "share": _both(made, lambda counts: round(counts.share(hot), 5)),
        "cold_experts": _both(made, lambda counts: _distinct(counts, rows, ~hot)),
    }


def _both(made: RoutingStatistics, figure: Callable[[Counts], Any]) -> dict[str, Any]:
    return {"in": figure(made.decide), "out": figure(made.judge) if made.judge else None}


def _distinct(counts: Counts, rows: int, among: np.ndarray | None = None) -> float | None:
    """Different experts a layer and step, None where the texts are shorter than a step."""
    return round(counts.distinct(rows, among), 4) if counts.groups[rows - 1] else None


def _by_rank(made: RoutingStatistics, counts: Counts) -> list[float]:
    """Share of a layer's routes that the expert of each rank serves, the mean of the layers; ranks by `decide`."""
    order = np.argsort(-made.decide.routes, axis=1, kind="stable")
    shares = counts.routes / counts.routes.sum(axis=1, keepdims=True)
    return [round(float(share), 6) for share in np.take_along_axis(shares, order, axis=1).mean(axis=0)]
