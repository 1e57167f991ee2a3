"""What a checkpoint writes with its experts reached one way or another; run apart, for it needs several devices.

    python texts_of_ways.py REQUEST        a JSON object, see `Request`; prints another one, by way

Each way decodes the same prompt with the same options. Every few steps two experts of a layer change places.
"""

import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

from v4flash.config import ModelConfig
from v4flash.engine import language_model, opening, peer_way, programs, ways
from v4flash.engine.backends import Backend
from v4flash.engine.language_model import LanguageModel
from v4flash.errors import V4FlashError
from v4flash.fidelity.certificate import Plan, certify
from v4flash.fidelity.model_logits import ModelLogits
from v4flash.fidelity.model_routes import ModelRoutes
from v4flash.model.fused.bodies import ReferenceBodies
from v4flash.placement import second_device
from v4flash.placement.second_device import SecondDevice
from v4flash.placement.table import COLD, HOT, Placement

SHAPES = programs.Shapes(rows=4, chunk=8, context=640)
PACKED_SHAPES = dataclasses.replace(SHAPES, rows=8)
STEPS_BETWEEN_SWAPS = 25
COMPUTATIONS_BEFORE_SILENCE = 20
PROMPT = [3, 17, 40, 22, 41, 9, 50, 55, 31, 44, 12]
SAMPLINGS = {"greedy": 0.0, "sampled": 1.0}


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
      checkpoint: folder.
      hot: hot experts of a layer.
      tokens: of each text.
      ways: of `v4flash.load`; 'packed' and 'packed peer' have packed weights and the operations' definitions.
      cache: keep compiled programs where V4FLASH_CACHE says.
      certify: also certify drafting, and count routes.
      lose: instead of these, decode with a sidecar that stops answering after a few of its computations.
    """

    checkpoint: str
    hot: int
    tokens: int
    ways: tuple[str, ...]
    cache: bool = False
    certify: bool = False
    lose: bool = False


class Compilations:
    """Counts the programs that are compiled."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **_) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def opened(request: Request, way: str) -> LanguageModel:
    """The checkpoint in float32, with its experts reached this way."""
    path = Path(request.checkpoint)
    if way.startswith("packed"):
        return packed(request, path, way)
    options = {} if way == ways.RESIDENT else {"experts": way, "hot_experts": request.hot}
    return language_model.load(
        path, rows=SHAPES.rows, chunk=SHAPES.chunk, context=SHAPES.context, mode="exact", dtype="float32",
        compile_cache=request.cache, **options,
    )  # fmt: skip


def packed(request: Request, path: Path, way: str) -> LanguageModel:
    """The checkpoint with packed weights, on what `backend fused` would launch if there were a GPU."""
    config = ModelConfig.from_file(path)
    numerics = language_model.choose_numerics(path, config, "exact", "float32")
    if way == "packed":
        found = opening.open_packed(path, numerics, PACKED_SHAPES, None, ReferenceBodies)
        return LanguageModel(*found, Backend("fused"))
    placement = ways.Wanted(ways.PEER, request.hot).placement(config)
    told = ways.Opening(path, numerics, PACKED_SHAPES, placement, True, None, lambda sentence: None)
    found = peer_way.open_peer_packed(told, ReferenceBodies)
    return LanguageModel(*found, Backend("fused", None, ways.PEER), placement=placement)


def text(model: LanguageModel, temperature: float, tokens: int) -> tuple[list[int], int]:
    """Ids, and how many experts came to the first device meanwhile."""
    random, moved = np.random.default_rng(0), 0
    made = model.generate(PROMPT, k=3, temperature=temperature, seed=5, max_tokens=tokens, ignore_eos=True)
    for step, _ in enumerate(made):
        if model.placement is not None and step % STEPS_BETWEEN_SWAPS == 1:
            moved += model.place_experts(swapped(model.placement, random))
    return made.tokens, moved


def swapped(placement: Placement, random: np.random.Generator) -> Placement:
    """With two experts of a random layer in each other's places."""
    layer = int(random.integers(placement.layers))
    return placement.swapped(
        layer, *(int(random.choice(placement.held(layer, tier))) for tier in (HOT, COLD))
    )


def checks(model: LanguageModel) -> dict:
    """The verdict of a small certificate, and the routes of the prompt."""
    found = certify(model, [PROMPT], Plan([2], 24), ModelLogits(model), lambda sentence: None)
    return {"verdict": found["verdict"], "routes": ModelRoutes(model)(PROMPT).tolist()}


def lost(request: Request) -> dict:
    """What happens when the second device falls silent in the middle of a text: tokens said, error, and seconds."""
    answer, calls, said = SecondDevice._answer, itertools.count(), []

    def silent(self, place, values):
        if next(calls) > COMPUTATIONS_BEFORE_SILENCE:
            time.sleep(3600)
        return answer(self, place, values)

    SecondDevice._answer, second_device.PATIENCE = silent, 1.0
    model = opened(request, ways.SIDECAR)
    started = time.perf_counter()
    try:
        for step in model.generate(PROMPT, k=0, temperature=0.0, max_tokens=40, ignore_eos=True):
            said += step.tokens
    except V4FlashError as error:
        return {"said": len(said), "error": str(error), "seconds": time.perf_counter() - started}
    return {"said": len(said)}


def facts(step) -> dict:
    """How many devices one executable runs on, and how often they add."""
    (devices,) = {len(sharding.device_set) for sharding in jax.tree.leaves(step.input_shardings)}
    return {"devices_of_a_step": devices, "sums": step.as_text().count(" all-reduce(")}


def main() -> None:
    """Prints {'devices', 'layers', 'ways': {way: {sampling: ids, 'moved', 'compiled', ...}}}."""
    request, compilations, found = Request(**json.loads(sys.argv[1])), Compilations(), {}
    for way in request.ways if not request.lose else ():
        model, own = opened(request, way), {"moved": 0}
        own["cached"] = model.programs.cached
        for sampling, temperature in SAMPLINGS.items():
            before = compilations.count
            own[sampling], moved = text(model, temperature, request.tokens)
            own["compiled"] = compilations.count - before  # of the last text
            own["moved"] += moved
        if way.endswith("peer"):
            own |= facts(model.programs.step.compiled)
        found[way] = own | (checks(model) if request.certify else {})
    layers = ModelConfig.from_file(Path(request.checkpoint)).num_hidden_layers
    found |= {"lost": lost(request)} if request.lose else {}
    print(json.dumps({"devices": len(jax.devices()), "layers": layers, "ways": found}))


if __name__ == "__main__":
    main()
