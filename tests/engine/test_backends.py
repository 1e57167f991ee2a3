"""The backends: the same text from both, packing that keeps one copy, and why a backend cannot run."""

import dataclasses
import types
from pathlib import Path

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_toys import small_toy
from toy_models import FAMILIES

from v4flash.checkpoint.loading import LoadedModel
from v4flash.engine import advice, backends, comparison, language_model, opening, programs
from v4flash.engine.session import Session
from v4flash.engine.statistics import Statistics
from v4flash.errors import CapacityError, UsageError, V4FlashError
from v4flash.fidelity.certificate import Plan, certify
from v4flash.fidelity.model_logits import ModelLogits
from v4flash.model.fused.bodies import FusedBodies, ReferenceBodies
from v4flash.model.fused.packing import pack_model
from v4flash.model.fused.tensors import backbone_tensors
from v4flash.model.numerics import Numerics
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.randomness import seed_key

CONTEXT = 96
FUSED_SHAPES = programs.Shapes(rows=8, chunk=8, context=CONTEXT)
PLAIN_SHAPES = programs.Shapes(rows=8, chunk=16, context=CONTEXT)
H200 = types.SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0")
FOUND_CPU = "backend fused needs an NVIDIA GPU of compute capability 9.0 or 10.3, found cpu"
BFLOAT, SINGLE, EXACT = (
    Numerics(jnp.bfloat16, True), Numerics(jnp.float32, True), Numerics(jnp.float32, False)
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Engine:
    """Programs with the weights they take."""

    pinned: programs.Programs
    params: object
    empty: object

    def session(self) -> Session:
        return Session(self.pinned, self.params, jax.tree.map(jnp.copy, self.empty))


@pytest.fixture(scope="module", autouse=True)
def compiling_is_quick():
    """Nothing here is worth optimising: the programs write a few dozen tokens."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# One family every time, the one with more operations; both with the slow tests.
@pytest.fixture(scope="module", params=["v41", pytest.param("v4", marks=pytest.mark.slow)])
def engines(request) -> tuple[Engine, Engine]:
    """(fused, on the operations' definitions; plain) of one small model."""
    model = small_toy(request.param)
    config, numerics = model.config, model.numerics
    packed = pack_model(model.model)
    fused = programs.build(None, packed, config, numerics, FUSED_SHAPES, None, bodies=ReferenceBodies)
    plain = programs.build(model.graphdef, model.params, config, numerics, PLAIN_SHAPES, None)
    return (
        Engine(fused, packed, programs.new_state(config, numerics, FUSED_SHAPES)),
        Engine(plain, model.params, programs.new_state(config, numerics, PLAIN_SHAPES)),
    )


def run(session: Session, prompt: list[int], count: int, k: int, temperature: float = 0.0) -> list[int]:
    control = programs.make_control(
        k, max(k, 5), SamplingParams.make(temperature=temperature), seed_key(11), ()
    )
    steps = session.generate(prompt, control, count, Statistics(k, 11))
    return [token for step in steps for token in step.tokens]


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(2, 95, length).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_backends_write_the_same_text(engines, temperature):
    """Prompts shorter than a pass of 8 rows, as long, and longer; no, few and all drafts."""
    for k, length in ((0, 1), (3, 7), (5, 8), (7, 9), (0, 20), (5, 20)):
        fused, plain = (run(engine.session(), prompt(length), 32, k, temperature) for engine in engines)
        assert fused == plain, (k, length)


def test_turns_rewinding_and_the_end_of_the_context(engines):
    sessions = [engine.session() for engine in engines]
    for turn, length in enumerate((9, 1, 8, 3)):
        fused, plain = (run(session, prompt(length), 7, k=2 * turn) for session in sessions)
        assert fused == plain
    for session in sessions:
        session.rewind(20)
    fused, plain = (run(session, prompt(4), 200, k=5) for session in sessions)
    assert fused == plain and len(sessions[0].tokens) == CONTEXT
    with pytest.raises(CapacityError, match="context is 96"):
        run(sessions[0], [5], 1, k=0)


@pytest.mark.parametrize("engines", ["v41"], indirect=True)
def test_a_bad_weight_is_named_with_fused_programs_too(engines):
    fused = engines[0]
    broken = _with_nan(small_toy("v41"), ("backbone", "layers", 0, "attn", "wkv", "weight"))
    engine = dataclasses.replace(fused, params=pack_model(broken))
    with pytest.raises(V4FlashError, match=r"at token 0, .*layer 0, tensor layers\.0\.attn\.wkv\.weight"):
        run(engine.session(), prompt(9), 4, k=3)


@pytest.mark.slow  # compiles two programs more
@pytest.mark.parametrize("engines", ["v41"], indirect=True)
def test_fused_programs_are_certified_advised_and_compared(engines):
    fused, small = engines[0], small_toy("v41")
    loaded = LoadedModel(small.config, small.numerics, None, fused.params, Path("no-files"))
    model = language_model.LanguageModel(loaded, fused.pinned, backends.Backend(backends.FUSED))
    prompts = [prompt(5), prompt(20)]
    found = certify(model, prompts, Plan([3, 7, "auto"], 24), ModelLogits(model), print)
    assert (found["verdict"], found["backend"], found["rows"]) == ("identical", "fused", 8)
    classes = {"some": [language_model.Prompt(ids, "") for ids in prompts]}
    sampling = {"temperature": 1.0, "top_p": 0.95}
    measured = advice.measure(model, classes, range(8), tokens=16, sampling=sampling, say=print)
    assert advice.advice(measured, small.config.draft.block_size)["verdict"]
    assert model.step_costs and model.speculation.costs.backend == "fused"
    compared = comparison.compare(
        model, classes, model.step_costs, sampling=sampling, tokens=16, longest=5, say=print
    )
    assert set(compared["classes"]["all"]["ways"]) == {*map(str, range(6)), "auto", "token"}


def _with_nan(model, path):
    variables = [
        (own, variable.replace(_broken(variable.get_value())) if own == path else variable)
        for own, variable in nnx.to_flat_state(model.params)
    ]
    return nnx.merge(model.graphdef, nnx.from_flat_state(variables))


def _broken(array: jax.Array) -> jax.Array:
    return array.at[(0,) * array.ndim].set(jnp.nan)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_that_can_be_bad_is_found_in_the_packed_model(family):
    model = small_toy(family)
    expected = {
        path: variable.get_value().dtype
        for path, variable in nnx.to_flat_state(model.params)
        if path[0] == "backbone" and jnp.issubdtype(variable.get_value().dtype, jnp.floating)
    }
    found = {path: values for path, values in backbone_tensors(model.config, pack_model(model.model))}
    found = {path: v for path, v in found.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    assert found.keys() == expected.keys()
    for path, values in found.items():
        assert bool(jnp.all(jnp.isfinite(values))), path


@pytest.mark.parametrize(
    "tail",
    [("attn", "wq_a"), ("attn", "indexer", "wq_b"), ("attn", "compressor", "wkv"), ("attn", "indexer", "weights_proj"),
     ("ffn", "shared_experts", "w1"), ("ffn", "shared_experts", "w3")],
)  # fmt: skip
def test_a_bad_weight_is_found_where_it_was_joined(tail):
    model, path = small_toy("v4"), ("backbone", "layers", 0, *tail, "weight")
    found = backbone_tensors(model.config, pack_model(_with_nan(model, path)))
    bad = [own for own, values in found if not bool(jnp.all(jnp.isfinite(values)))]
    assert bad == [path]


def test_draining_packs_the_same_and_leaves_no_layer():
    model = small_toy("v41").model
    expected, found = pack_model(model), pack_model(model, drain=True)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert len(model.backbone.layers) == len(model.drafter.stages) == 0
    abstract = backends.packed_shapes(small_toy("v41").config, small_toy("v41").numerics)
    assert jax.tree.structure(abstract) == jax.tree.structure(found)


def test_programs_of_other_bodies_are_cached_apart(monkeypatch):
    model, seen = small_toy("v4"), []

    def caught(name, function, arguments, outputs, donated, facts, cache):
        seen.append(facts)
        return None, True

    monkeypatch.setattr(programs, "executable", caught)
    for bodies in (None, ReferenceBodies, FusedBodies):
        programs.build(
            model.graphdef, model.params, model.config, model.numerics, FUSED_SHAPES, None, bodies=bodies
        )
    assert len(seen) == 9 and len(set(seen)) == 3


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that fused launches are made for, as far as the choice can see."""
    monkeypatch.setattr(backends, "current_device", lambda: H200)


def test_auto_takes_what_can_run(gpu):
    assert backends.choose("auto", BFLOAT, 8) == backends.Backend("fused")
    assert backends.choose("fused", SINGLE, 8) == backends.Backend("fused")
    assert backends.choose("xla", BFLOAT, 16) == backends.Backend("xla")
    assert backends.choose("auto", BFLOAT, 16).note.startswith(
        "rows is 16, but passes of backend fused have 8"
    )
    plain, asked = (backends.choose(wanted, EXACT, 8) for wanted in ("auto", "fused"))
    assert (
        (plain.name, asked.name) == ("xla", "fused") and "float16" in plain.note and "float16" in asked.note
    )


def test_a_device_without_launches(monkeypatch):
    assert backends.choose("auto", BFLOAT, 8) == backends.Backend("xla", FOUND_CPU)
    with pytest.raises(CapacityError, match=f"{FOUND_CPU}; use --backend xla"):
        backends.choose("fused", BFLOAT, 8)
    older = types.SimpleNamespace(device_kind="NVIDIA A100", compute_capability="8.0")
    monkeypatch.setattr(backends, "current_device", lambda: older)
    with pytest.raises(CapacityError, match="found NVIDIA A100 of compute capability 8.0"):
        backends.choose("fused", BFLOAT, 8)


@pytest.mark.parametrize("package", backends.PACKAGES)
def test_a_missing_package_is_named_with_the_extra(gpu, monkeypatch, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(CapacityError, match=rf"needs the package {package}.*pip install v4flash\[gpu\]"):
        backends.choose("fused", BFLOAT, 8)
    assert package in backends.choose("auto", BFLOAT, 8).note


def test_what_fused_passes_cannot_be(gpu, monkeypatch):
    with pytest.raises(UsageError, match="rows is 16, but passes of backend fused have 8, for k up to 7"):
        backends.choose("fused", BFLOAT, 16)
    with pytest.raises(UsageError, match="'guess', expected auto, xla, fused"):
        backends.choose("guess", BFLOAT, 8)
    monkeypatch.setattr(backends.launch, "INTERPRETED", True)
    with pytest.raises(CapacityError, match="TRITON_INTERPRET is 1; unset it"):
        backends.choose("fused", BFLOAT, 8)


def test_chunks_follow_from_the_backend():
    fused, plain = backends.Backend("fused"), backends.Backend("xla")
    assert [backends.chosen_chunk(plain, chunk) for chunk in (None, 32)] == [(128, None), (32, None)]
    assert [backends.chosen_chunk(fused, chunk) for chunk in (None, 8)] == [(8, None), (8, None)]
    length, note = backends.chosen_chunk(fused, 32)
    assert length == 8 and note == "chunk is 32, but passes of backend fused have 8 rows: using 8"


def test_shapes_without_a_body_are_refused_in_one_sentence():
    model, shapes = small_toy("v4"), dataclasses.replace(FUSED_SHAPES, chunk=16)
    packed = backends.packed_shapes(model.config, model.numerics)
    with pytest.raises(backends.NoFusedBody, match="does not fit backend fused: .*; use --backend xla"):
        programs.build(None, packed, model.config, model.numerics, shapes, None, bodies=FusedBodies)
    narrow = dataclasses.replace(model.config, q_lora_rank=24)
    with pytest.raises(backends.NoFusedBody, match="multiple"):
        backends.packed_shapes(narrow, model.numerics)


def test_what_compiling_refuses_falls_back_only_under_auto(gpu, monkeypatch):
    """`auto` notes the reason once and goes on with plain modules; `fused` stops."""
    folder, said, noted = Path(__file__).parents[1] / "data" / "twin", [], []

    def refused(*arguments, bodies=None, **options):
        if bodies is not None:
            raise backends.no_fused_body(ValueError("7 columns, expected 8"))
        return types.SimpleNamespace(shapes=arguments[4])

    monkeypatch.setattr(opening.programs, "build", refused)
    options = dict(dtype="bfloat16", mode="qat", compile_cache=False, progress=said.append, note=noted.append)
    with pytest.raises(
        CapacityError, match="does not fit backend fused: 7 columns, expected 8; use --backend"
    ):
        language_model.load(folder, backend="fused", **options)
    model = language_model.load(folder, **options)
    assert model.backend == "xla" and model.programs.shapes.chunk == 128
    assert noted == ["backend xla: this checkpoint does not fit backend fused: 7 columns, expected 8"]
