"""A random checkpoint of two layers with a byte tokenizer, and the command line called in this process."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from v4flash.checkpoint.export import save_published
from v4flash.checkpoint.inventory import abstract_model
from v4flash.cli import main
from v4flash.config import ModelConfig
from v4flash.model.numerics import Numerics
from v4flash.text.tokenizer import ASSISTANT, BOS, EOS, PAD, THINK_CLOSE, THINK_OPEN, USER

TRAINED_BLOCK = 3
CONTEXT_LIMIT = 512
CONFIG = dict(
    model_type="deepseek_v4", vocab_size=272, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=96, qk_rope_head_dim=32, q_lora_rank=32,
    o_lora_rank=32, o_groups=2, sliding_window=8, index_n_heads=2, index_head_dim=32, index_topk=4,
    n_routed_experts=4, num_experts_per_tok=2, routed_scaling_factor=1.5, swiglu_limit=10.0, hc_mult=2,
    hc_sinkhorn_iters=3, hc_eps=1e-6, rms_norm_eps=1e-6, max_position_embeddings=CONTEXT_LIMIT,
    rope_theta=10000, compress_rope_theta=160000, compress_ratios=[0, 4, 0], num_hash_layers=1,
    bos_token_id=0, eos_token_id=1, dspark_block_size=TRAINED_BLOCK, dspark_noise_token_id=270,
    dspark_target_layer_ids=[1], dspark_markov_rank=8, expert_dtype="fp4",
    # No activation scheme: exact arithmetic by default, whose programs compile faster.
    quantization_config={"weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
)  # fmt: skip


def tokenizer_json() -> dict:
    """A tokenizer whose pieces are the 256 bytes, with the control tokens of the family."""
    vocab = {content: token_id for token_id, content in enumerate((BOS, EOS, PAD))}
    vocab |= {piece: 3 + at for at, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tags = {tag: len(vocab) + at for at, tag in enumerate((USER, ASSISTANT, THINK_OPEN, THINK_CLOSE))}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    added = [
        {"id": token_id, "content": content, "special": token_id < 3, "normalized": token_id >= 3, **flags}
        for content, token_id in [(BOS, 0), (EOS, 1), (PAD, 2), *tags.items()]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": [],
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip


def random_params(raw: dict) -> nnx.State:
    """Seeded noise for every array of a configuration, norms near one."""
    config, random = ModelConfig.from_dict(raw), np.random.default_rng(11)
    filled = []
    for path, variable in abstract_model(config, Numerics(packed=False))[1]:
        value = variable.get_value()
        if path[-1] == "tid2eid":
            array = random.integers(0, config.n_routed_experts, value.shape).astype(np.int32)
        else:
            width = value.shape[-1] if len(value.shape) > 1 else 25
            array = random.normal(size=value.shape) * 2 / np.sqrt(width) + str(path[-2]).endswith("norm")
        filled.append((path, variable.replace(jnp.asarray(array, value.dtype))))
    return nnx.from_flat_state(filled)


def write_checkpoint(directory: Path, raw: dict, *, tokenizer: bool = True) -> Path:
    """Writes a random checkpoint and returns its folder."""
    files = {"tokenizer.json": json.dumps(tokenizer_json()).encode()} if tokenizer else {}
    save_published(directory, raw, random_params(raw), extra_files=files)
    return directory


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "toy", CONFIG)


@pytest.fixture(scope="session")
def plain_checkpoint(tmp_path_factory) -> Path:
    """One layer without drafter and tokenizer."""
    raw = {name: value for name, value in CONFIG.items() if not name.startswith("dspark")}
    raw |= {"num_hidden_layers": 1, "compress_ratios": [0]}
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "plain", raw, tokenizer=False)


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("compiled")


class Outcome(NamedTuple):
    """What one command line gave back."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys, monkeypatch, cache_folder) -> Callable[..., Outcome]:
    """Calls `v4flash ...` with compiled programs kept for the session and no option set by the environment."""

    for name in [name for name in os.environ if name.startswith("V4FLASH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("V4FLASH_CACHE", str(cache_folder))

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def decode(call, checkpoint) -> Callable[..., Outcome]:
    """Calls `v4flash decode` on the random checkpoint with a small context."""

    def run(*arguments: object) -> Outcome:
        return call("decode", "--ckpt", checkpoint, "--ctx", 256, "--chunk", 32, *arguments)

    return run
