"""`v4flash inspect` and `convert` from the outside."""

import json

from v4flash.checkpoint.safetensors_file import SafetensorsFile, write_safetensors


def test_inspect_prints_the_same_facts_as_text_and_as_json(call, checkpoint):
    text = call("inspect", checkpoint)
    assert text.code == 0 and "deepseek_v4" in text.out and text.err == ""
    facts = call("inspect", checkpoint, "--json")
    found = json.loads(facts.out)
    assert facts.code == 0 and found["schema"] == 1
    assert found["drafter"]["block_size"] == 3
    assert f"{found['tensors']:,} tensors" in text.out


def test_inspect_reads_a_mere_configuration(call, checkpoint):
    outcome = call("inspect", checkpoint / "config.json")
    assert outcome.code == 0 and "from the configuration alone" in outcome.out


def test_inspect_returns_3_for_what_loading_would_refuse(call, checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors.index.json").unlink()
    shard = next(tmp_path.glob("*.safetensors"))
    stored = SafetensorsFile(shard)
    kept = {name: (info.dtype, stored.tensor(name)) for name, info in stored.tensors.items()}
    shard.rename(tmp_path / "old")
    del kept["norm.weight"]
    write_safetensors(tmp_path / "model.safetensors", kept)
    outcome = call("inspect", tmp_path)
    assert outcome.code == 3 and "missing: 1 (norm.weight)" in outcome.out
    assert call("inspect", tmp_path / "absent").code == 3


def test_converted_checkpoint_says_the_same(call, decode, checkpoint, tmp_path):
    converted = tmp_path / "converted"
    outcome = call("convert", checkpoint, converted)
    assert (outcome.code, outcome.out) == (0, "") and str(converted) in outcome.err
    refused = call("convert", checkpoint, converted)
    assert refused.code == 2 and "--overwrite" in refused.err
    assert call("convert", checkpoint, converted, "--overwrite").code == 0
    sampled = ("--prompt", "hello", "--temperature", 1, "--max-tokens", 12)
    expected, found = decode(*sampled), decode(*sampled, "--ckpt", converted)
    assert found.code == 0, found.err
    assert found.out == expected.out != ""
