"""Experts on two devices, on processors that pretend to be several: the same text as on one, token for token."""

import dataclasses
import json
from pathlib import Path

import pytest
import texts_of_ways
from packed_toys import SMALL
from several_devices import QUICK, apart
from texts_of_ways import SAMPLINGS, Request
from toy_models import FAMILIES, random_toy, toy, toy_json, with_table_sizes

from v4flash.checkpoint.export import save_published
from v4flash.config import ModelConfig
from v4flash.engine import language_model
from v4flash.errors import CapacityError

TOKENS, HOT = 500, 5
DEVICES = (2, 4)
# A run compiles three models. One family and number of devices every time, all of them with the slow tests.
USUAL = ("v41", 2)
CASES = [
    pytest.param(family, devices, marks=() if (family, devices) == USUAL else pytest.mark.slow)
    for family in FAMILIES
    for devices in DEVICES
]


def texts(devices: int, request: Request, **settings: str) -> dict:
    """What `texts_of_ways.py` prints in a process with so many devices."""
    found = apart(texts_of_ways.__file__, devices, json.dumps(dataclasses.asdict(request)), **settings)
    assert found["devices"] == devices
    return found


def checkpoint(folder: Path, family: str) -> str:
    """A toy of a family as a published checkpoint."""
    save_published(folder, toy_json(family), toy(family).params)
    return str(folder)


def assert_same_texts(found: dict, tokens: int) -> None:
    first, *others = found["ways"].values()
    assert others
    for way in others:
        assert way["moved"] >= len(SAMPLINGS)
        assert way["compiled"] == 0
        for sampling in SAMPLINGS:
            assert len(way[sampling]) == tokens
            assert way[sampling] == first[sampling]


@pytest.mark.parametrize(("family", "devices"), CASES)
def test_texts_are_those_of_one_device_while_experts_move(family, devices, tmp_path):
    request = Request(
        checkpoint(tmp_path / "toy", family), HOT, TOKENS, ("resident", "peer", "host", "sidecar")
    )
    found = texts(devices, request)
    assert_same_texts(found, TOKENS)
    peer = found["ways"]["peer"]
    assert (peer["devices_of_a_step"], peer["sums"]) == (2, found["layers"])


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    """Two layers with an index and an n-gram memory."""
    raw = with_table_sizes(SMALL["v41"])
    folder = tmp_path_factory.mktemp("small") / "toy"
    save_published(folder, raw, random_toy(ModelConfig.from_dict(raw), quantise=False).params)
    return str(folder)


def test_certificate_and_routes_are_those_of_one_device(small, tmp_path):
    """And programs that were kept on disk run on the devices that they were compiled for."""
    request = Request(small, HOT, 40, ("resident", "peer", "sidecar"), cache=True, certify=True)
    settings = QUICK | {"V4FLASH_CACHE": str(tmp_path)}
    found = texts(2, request, **settings)
    assert_same_texts(found, 40)
    again = texts(2, dataclasses.replace(request, certify=False), **settings)
    for way in request.ways:
        assert (found["ways"][way]["cached"], again["ways"][way]["cached"]) == (False, True)
        assert [again["ways"][way][s] for s in SAMPLINGS] == [found["ways"][way][s] for s in SAMPLINGS]
    routes = found["ways"]["resident"]["routes"]
    for way in found["ways"].values():
        assert way["verdict"] == "identical"
        assert way["routes"] == routes


def test_packed_weights_on_two_devices_write_what_they_write_on_one(small):
    found = texts(2, Request(small, HOT, 60, ("packed", "packed peer")), **QUICK)
    assert_same_texts(found, 60)
    peer = found["ways"]["packed peer"]
    assert (peer["devices_of_a_step"], peer["sums"]) == (2, found["layers"])


@pytest.mark.parametrize(("way", "missing"), [("peer", "two devices"), ("sidecar", "a device beside")])
def test_one_device_is_not_enough(small, way, missing):
    with pytest.raises(CapacityError, match=f"--experts {way} needs {missing}.*use --experts host"):
        language_model.load(small, experts=way, hot_experts=HOT)


def test_a_sidecar_that_disappears_ends_the_text_with_one_sentence(small):
    """The second device stops answering in the middle of a text: what was said stays, and nobody waits for ever."""
    lost = texts(2, Request(small, HOT, 0, (), lose=True), **QUICK)["ways"]["lost"]
    assert lost["said"] > 0 and lost["seconds"] < 30
    assert lost["error"].startswith("the second device, ") and "\n" not in lost["error"]
