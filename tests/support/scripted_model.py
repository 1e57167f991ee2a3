"""A model that says what a test wrote: the smallest toy, its weights set so that every token has one successor.

Attention and experts add nothing, so the last hidden vector is the embedding of the newest token, and the head turns it
into the logits of its successor. The drafter's token bias holds successors of its own, wrong where a test wants that.
All programs are those of mini_sessions.py; nothing is compiled anew, and nothing but weights is made up.
"""

import dataclasses
from pathlib import Path

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np
from mini_sessions import compiled
from toy_models import toy

from v4flash.checkpoint.loading import LoadedModel
from v4flash.engine.language_model import LanguageModel

END, FIRST = 1, 2
# Far above what random directions share with one another: the successor's logit is the largest by hundreds.
_TARGET_LOGIT, _DRAFT_LOGIT = 1e3, 1e5


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A tokenizer of one id for every piece of a script, in order from FIRST on, though pieces may be alike."""

    texts: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        return FIRST + len(self.texts)

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token - FIRST].encode()


def scripted_model(pieces: list[str], wrong: dict[int, int] | None = None) -> LanguageModel:
    """A model that says `pieces` one after another, then the end token.

    Args: wrong, by place of a piece the place of the one that the drafter expects behind it.
    """
    config = toy("mini").config
    ids = range(FIRST, FIRST + len(pieces))
    assert ids.stop < config.draft.noise_token_id
    successor = {token: token + 1 for token in ids} | {ids[-1]: END}
    drafted = successor | {FIRST + at: FIRST + instead for at, instead in (wrong or {}).items()}
    random = np.random.default_rng(3)
    found = []
    for path, variable in nnx.to_flat_state(toy("mini").params):
        value = np.array(variable.get_value())
        name, owner = path[-1], path[-2]
        if owner in ("wo_b", "w2"):
            value[:] = 0
        elif path in (("backbone", "norm", "weight"), ("drafter", "stages", 0, "norm", "weight")):
            value[:] = 1
        elif path == ("backbone", "embed") or (owner, name) == ("markov_head", "embed"):
            value = random.normal(size=value.shape)
            value /= np.linalg.norm(value, axis=1, keepdims=True)
        found.append((path, variable, value))
    arrays = {path: value for path, _, value in found}
    stage = ("drafter", "stages", 0, "markov_head")
    arrays["backbone", "head"][:] = 0
    arrays[(*stage, "head")][:] = 0
    for token in ids:
        arrays["backbone", "head"][successor[token]] += _TARGET_LOGIT * arrays["backbone", "embed"][token]
        arrays[(*stage, "head")][drafted[token]] += _DRAFT_LOGIT * arrays[(*stage, "embed")][token]
    params = nnx.from_flat_state(
        [(path, variable.replace(jnp.asarray(value, jnp.float32))) for path, variable, value in found]
    )
    tiny = toy("mini")
    model = LanguageModel(
        LoadedModel(tiny.config, tiny.numerics, tiny.graphdef, params, Path("no-files")), compiled()
    )
    model.tokenizer = Pieces(tuple(pieces))
    return model
