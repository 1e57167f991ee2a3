"""How often each expert was chosen over real text, and what share of that a hot set would serve.

Knows: counts by layer and expert, kept apart for the texts that decide which experts are hot and for those that judge
the choice, and their JSON file. Does not know: models, tokenizers, or where an expert lives.

A hot set chosen and judged on the same texts looks better than it is, so a share is said for both halves: `in sample`
on the texts that decided, `out of sample` on the others. All figures are of texts that were there from the beginning;
drafts that a model rejects choose experts too, and those are not counted.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from v4flash.checkpoint.safetensors_file import write_atomically
from v4flash.config import ModelConfig
from v4flash.errors import UsageError, V4FlashError

SCHEMA = "v4flash.routing/1"
GROUP_ROWS = 8  # the most rows of a step whose different experts are counted
DECIDE, JUDGE = "decide", "judge"
_AGAIN = "make it again with `v4flash experts profile --out`"


@dataclasses.dataclass(frozen=True)
class Text:
    """A text that was counted: its file's name, sha256 of its bytes, rows, and the half it belongs to."""

    name: str
    digest: str
    rows: int
    half: str


@dataclasses.dataclass(frozen=True)
class Counts:
    """How rows chose experts.

    Attributes:
      rows: rows counted.
      routes: int64 [L, E], how often each layer's rows chose each expert.
      groups: int64 [R], the groups of 1, 2, ... R consecutive rows, none of which share a row.
      present: int64 [R, L, E], the groups of that size in which some row chose the expert.
    """

    rows: int
    routes: np.ndarray
    groups: np.ndarray
    present: np.ndarray

    @classmethod
    def empty(cls, layers: int, experts: int) -> "Counts":
        return cls(
            0,
            np.zeros((layers, experts), np.int64),
            np.zeros((GROUP_ROWS,), np.int64),
            np.zeros((GROUP_ROWS, layers, experts), np.int64),
        )

    @classmethod
    def of(cls, routes: np.ndarray, experts: int) -> "Counts":
        """Counts of one stretch of text: expert ids [L, N, K] of its N live rows."""
        layers, rows, chosen = routes.shape
        made = cls.empty(layers, experts)
        seen = np.zeros((layers, rows, experts), bool)
        np.put_along_axis(seen, routes.astype(np.int64), True, axis=2)
        for layer in range(layers):
            made.routes[layer] = np.bincount(routes[layer].ravel(), minlength=experts)
        for size in range(1, GROUP_ROWS + 1):
            groups = rows // size
            grouped = seen[:, : groups * size].reshape(layers, groups, size, experts)
            made.groups[size - 1] = groups
            made.present[size - 1] = grouped.any(axis=2).sum(axis=1)
        return dataclasses.replace(made, rows=rows)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.rows + other.rows,
            self.routes + other.routes,
            self.groups + other.groups,
            self.present + other.present,
        )

    def share(self, hot: np.ndarray) -> float:
        """Share of the routes that choose an expert of `hot` bool [L, E]."""
        return float(self.routes[hot].sum() / self.routes.sum())

    def distinct(self, rows: int, among: np.ndarray | None = None) -> float:
        """Different experts a layer that a group of `rows` rows chooses, of those `among` bool [L, E].

        Raises ValueError where no group of that size was counted.
        """
        if not 1 <= rows <= GROUP_ROWS or not self.groups[rows - 1]:
            raise ValueError(f"no groups of {rows} rows were counted")
        found = self.present[rows - 1]
        found = found if among is None else found[among]
        return float(found.sum() / (self.groups[rows - 1] * self.routes.shape[0]))

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "counts": self.routes.tolist(),
            "groups": self.groups.tolist(),
            "present": self.present.tolist(),
        }

    @classmethod
    def from_json(cls, found: dict[str, Any], layers: int, experts: int) -> "Counts":
        """Raises ValueError for other shapes or numbers that are no counts, KeyError for a part that is absent."""
        made = cls(
            int(found["rows"]),
            *(np.asarray(found[name], np.int64) for name in ("counts", "groups", "present")),
        )
        empty = cls.empty(layers, experts)
        for name in ("routes", "groups", "present"):
            array = getattr(made, name)
            if array.shape != getattr(empty, name).shape or array.min() < 0:
                raise ValueError(f"{name} have shape {list(array.shape)} or numbers below 0")
        return made


def hottest(counts: np.ndarray, hot: int) -> np.ndarray:
    """The `hot` most chosen experts of each layer of counts [L, E], of equal ones the first: bool [L, E]."""
    order = np.argsort(-counts, axis=1, kind="stable")
    chosen = np.zeros(counts.shape, bool)
    np.put_along_axis(chosen, order[:, :hot], True, axis=1)
    return chosen


def halves(rows: Sequence[int]) -> list[str]:
    """The half of each text, given their rows in order: the one that has fewer rows so far; the first decides."""
    total, found = {DECIDE: 0, JUDGE: 0}, []
    for count in rows:
        half = min(total, key=total.__getitem__)
        total[half] += count
        found.append(half)
    return found


def identity(config: ModelConfig) -> dict[str, Any]:
    """What a configuration must share with the one that was counted."""
    return {
        "family": config.family,
        "layers": config.num_hidden_layers,
        "experts": config.n_routed_experts,
        "chosen": config.num_experts_per_tok,
        "hash_layers": [layer.index for layer in config.layers if layer.hash_routed],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }


@dataclasses.dataclass(frozen=True)
class RoutingStatistics:
    """Counts of a model over texts.

    Attributes:
      model: `identity` of its configuration.
      weights: fingerprint of its weight files.
      texts: what was counted.
      decide, judge: counts of the texts that choose hot experts, and of those that judge the choice; None where there
        was one text only.
    """

    model: dict[str, Any]
    weights: str
    texts: tuple[Text, ...]
    decide: Counts
    judge: Counts | None

    @property
    def all(self) -> Counts:
        """Counts of every text: what a placement is made from."""
        return self.decide + self.judge if self.judge else self.decide

    @property
    def judged(self) -> Counts:
        """Counts that say what a hot set is worth: out of sample where there is a second half."""
        return self.judge or self.decide

    def hot(self, count: int) -> np.ndarray:
        """The `count` hottest experts of each layer by the deciding texts: bool [L, E]."""
        return hottest(self.decide.routes, count)

    def require(self, config: ModelConfig, where: str, weights: str | None = None) -> None:
        """Raises UsageError unless the counts are of this configuration, and of these weights if they are given."""
        wanted = identity(config)
        differing = [name for name in wanted if self.model.get(name) != wanted[name]]
        if differing:
            found, expected = (
                ", ".join(f"{name.replace('_', ' ')} {of.get(name)}" for name in differing)
                for of in (self.model, wanted)
            )
            raise UsageError(f"{where} counts another model: it has {found}, this one {expected}; {_AGAIN}")
        if weights is not None and weights != self.weights:
            raise UsageError(f"{where} counts other weights than those of this checkpoint; {_AGAIN}")

    def to_json(self) -> dict[str, Any]:
        total = self.all
        return {
            "schema": SCHEMA,
            "model": self.model,
            "weights": self.weights,
            "texts": [dataclasses.asdict(text) for text in self.texts],
            "rows": total.rows,
            "counts": total.routes.tolist(),
            DECIDE: self.decide.to_json(),
            JUDGE: self.judge.to_json() if self.judge else None,
        }

    def write(self, path: Path) -> None:
        """Writes the file as a whole or not at all. Raises V4FlashError when the disk refuses."""
        try:
            write_atomically(path, [json.dumps(self.to_json()).encode() + b"\n"])
        except OSError as error:
            raise V4FlashError(f"writing {path} failed ({error.strerror}); check disk and rights") from None


def read(path: Path) -> RoutingStatistics:
    """Statistics that `write` wrote. Raises UsageError where the file cannot be read or contradicts itself."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {path} ({error.strerror}); make one with `v4flash experts profile --out`"
        ) from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}); {_AGAIN}") from None
    try:
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']}, expected {SCHEMA}")
        sizes = found["model"]["layers"], found["model"]["experts"]
        made = RoutingStatistics(
            found["model"],
            found["weights"],
            tuple(Text(**text) for text in found["texts"]),
            Counts.from_json(found[DECIDE], *sizes),
            found[JUDGE] and Counts.from_json(found[JUDGE], *sizes),
        )
        if not np.array_equal(made.all.routes, found["counts"]) or not made.all.routes.any():
            raise ValueError("counts are none, or not the sum of their halves")
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} holds no routing statistics ({error}); {_AGAIN}") from None
    return made


def digest(content: bytes) -> str:
    """sha256 of a text's bytes."""
    return hashlib.sha256(content).hexdigest()
