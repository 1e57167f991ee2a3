"""Routes of whole texts on toy models, and profiles whose figures are counted again by hand."""

import types
from collections import Counter

import numpy as np
import pytest
from packed_toys import small_toy
from toy_models import FAMILIES, Toy, toy, toy_json

from v4flash.config import ModelConfig
from v4flash.engine.backends import module_form, packed_form, packed_weights
from v4flash.engine.programs import Runner, Shapes, executable
from v4flash.errors import UsageError
from v4flash.fidelity import routing_profile
from v4flash.fidelity.model_routes import ModelRoutes
from v4flash.fidelity.routing_profile import TextFile
from v4flash.model.fused.bodies import ReferenceBodies
from v4flash.placement.statistics import DECIDE, JUDGE, Counts

CONTEXT = 64


def routes_of(made: Toy, chunk: int, form=None, params=None) -> ModelRoutes:
    """The routes of a toy on its modules, or on weights `params` of another form."""
    pinned = types.SimpleNamespace(
        shapes=Shapes(8, chunk, CONTEXT),
        model=(form or module_form(made.graphdef)).model,
        runner=Runner(executable),
    )
    return ModelRoutes(
        types.SimpleNamespace(
            config=made.config,
            numerics=made.numerics,
            params=made.params if params is None else params,
            backend="xla",
            programs=pinned,
        )
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_of_a_chunk_is_not_among_the_routes(family):
    """37 rows in chunks of 16 leave 11 dead ones with token 0, whose routes would be real experts."""
    config = toy(family).config
    ids = np.random.default_rng(5).integers(2, 95, 37).tolist()
    padded, whole = routes_of(toy(family), 16)(ids), routes_of(toy(family), 37)(ids)
    assert padded.shape == (config.num_hidden_layers, 37, config.num_experts_per_tok)
    np.testing.assert_array_equal(padded, whole)
    for layer in (layer.index for layer in config.layers if layer.hash_routed):
        table = toy(family).model.backbone.layers[layer].ffn.gate.tid2eid[...]
        np.testing.assert_array_equal(padded[layer], np.asarray(table)[ids])
    counts = Counts.of(padded, config.n_routed_experts)
    assert counts.routes.sum(axis=1).tolist() == [37 * config.num_experts_per_tok] * config.num_hidden_layers


def test_packed_weights_choose_the_same_experts():
    """Passes of 8 rows on packed weights, with the operations' definitions in place of the launches."""
    made = small_toy("v4")
    ids = np.random.default_rng(6).integers(2, 95, 19).tolist()
    packed = routes_of(
        made, 8, packed_form(made.config, made.numerics, ReferenceBodies), packed_weights(made.model)
    )
    np.testing.assert_array_equal(packed(ids), routes_of(made, 24)(ids))


CONFIG = ModelConfig.from_dict(toy_json("v4"))
CONTENTS = {"a": "aab" * 20, "b": "bcd" * 15, "c": "ddef" * 9}
TEXTS = [TextFile(name, name, content) for name, content in CONTENTS.items()]


def encode(text: str) -> list[int]:
    return [0, *map(ord, text)]


def pick(token: int, place: int, layer: int) -> list[int]:
    """Two different experts, most often those that a token likes."""
    first = (token + layer * (place % 3 == 0)) % CONFIG.n_routed_experts
    return [first, (first + 1 + token % 3) % CONFIG.n_routed_experts]


def routes(ids) -> np.ndarray:
    layers = range(CONFIG.num_hidden_layers)
    return np.asarray([[pick(token, place, layer) for place, token in enumerate(ids)] for layer in layers])


def profile(texts=TEXTS, **changed):
    settings = dict(context=25, rows=6, hot=(2, 5)) | changed
    return routing_profile.profile(texts, encode, routes, CONFIG, "ff", **settings)


def pieces(text: TextFile) -> list[list[int]]:
    ids = encode(text.content)[1:]
    return [[0, *ids[start : start + 24]] for start in range(0, len(ids), 24)]


def test_in_and_out_of_sample_are_what_enumeration_says():
    found = profile()
    made = found.statistics
    assert [(text.name, text.half, text.rows) for text in made.texts] == [
        ("a", DECIDE, 63), ("b", JUDGE, 47), ("c", JUDGE, 38)
    ]  # fmt: skip
    layers = range(CONFIG.num_hidden_layers)
    chosen = {
        text.name: [
            [e for ids in pieces(text) for row in routes(ids)[layer] for e in row] for layer in layers
        ]
        for text in TEXTS
    }
    figures = routing_profile.figures(found)
    for entry in figures["hot"]:
        served = {"in": [], "out": []}
        for layer in layers:
            counts = Counter(chosen["a"][layer])
            hot = sorted(range(CONFIG.n_routed_experts), key=lambda e: (-counts[e], e))[: entry["hot"]]
            served["in"] += [expert in hot for expert in chosen["a"][layer]]
            served["out"] += [expert in hot for name in "bc" for expert in chosen[name][layer]]
        for half, expected in served.items():
            assert entry["share"][half] == pytest.approx(np.mean(expected), abs=1e-5)
    assert figures["hot"][0]["share"]["in"] > figures["hot"][0]["share"]["out"] > 0
    assert figures["rows"] == {"in": 63, "out": 85} and figures["label"] == "measured"


def test_cold_experts_of_a_step_agree_with_the_guesses_account():
    """Two ways to count the same thing: groups of rows, and steps that a cache lives through."""
    found = profile()
    figures = routing_profile.figures(found)
    guessed = {row["hot"]: row for row in figures["predictions"]}
    assert sorted(guessed) == [0, 2, 5]
    layers = CONFIG.num_hidden_layers
    assert guessed[0]["cold_experts_a_step"] / layers == pytest.approx(
        figures["distinct_experts"]["out"], 1e-3
    )
    for entry in figures["hot"]:
        expected = entry["cold_experts"]["out"]
        assert guessed[entry["hot"]]["cold_experts_a_step"] / layers == pytest.approx(expected, 1e-3)


def test_popularity_falls_in_sample_and_sums_to_one():
    popularity = routing_profile.figures(profile())["popularity"]
    assert popularity["in"] == sorted(popularity["in"], reverse=True)
    for shares in popularity.values():
        assert len(shares) == CONFIG.n_routed_experts and sum(shares) == pytest.approx(1, abs=1e-5)


def test_one_text_is_judged_by_nobody():
    figures = routing_profile.figures(profile(TEXTS[:1]))
    assert figures["rows"] == {"in": 63, "out": None} and figures["popularity"]["out"] is None
    assert all(entry["share"]["out"] is None and entry["share"]["in"] > 0 for entry in figures["hot"])
    assert figures["predictions"][0]["steps"] == 2 * (25 // 6) + 13 // 6, "guessed on the text that there is"


def test_text_shorter_than_a_step_counts_without_steps():
    figures = routing_profile.figures(profile([TextFile("a", "a", "ab")]))
    assert figures["rows"]["in"] == 3 and figures["distinct_experts"]["in"] is None
    assert figures["hot"][0]["share"]["in"] > 0


def test_one_token_over_and_over_is_no_text():
    with pytest.raises(UsageError, match="zeros is one token over and over"):
        profile([*TEXTS, TextFile("zeros", "z", "0" * 50)])


@pytest.mark.parametrize("content", [b"", b" \n\t\n", b"\0\0\0\0"])
def test_files_without_text_are_refused_in_one_sentence(tmp_path, content):
    file = tmp_path / "empty.txt"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="holds no text") as problem:
        routing_profile.read_texts([str(file)])
    assert "\n" not in str(problem.value)


def test_files_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not valid UTF-8"):
        routing_profile.read_texts([str(tmp_path / "a.txt")])
    with pytest.raises(UsageError, match="cannot read"):
        routing_profile.read_texts([str(tmp_path / "absent.txt")])
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the same")
    with pytest.raises(UsageError, match="is the same text as a.txt"):
        routing_profile.read_texts([str(tmp_path / name) for name in ("a.txt", "b.txt")])


def test_hot_experts_to_report_are_at_least_those_of_a_row():
    assert routing_profile.hot_counts(ModelConfig.from_file("configs/models/v4-flash-0731.json")) == (
        64, 128, 160, 192, 224
    )  # fmt: skip
    assert min(routing_profile.hot_counts(CONFIG)) == CONFIG.num_experts_per_tok
