"""Cuts the complete golden data down to what is kept in the repository: tests/data/golden.

    python tests/support/cut_golden.py COMPLETE_FOLDER

Random weights do not compress, so the cut leaves out what its comparisons never read: most layers, experts that
no compared row chooses, and rows of the vocabulary's tables whose ids never occur (logits are then compared in
the columns that are left). A comparison that goes wrong reads zeros there, and fails. Which experts are chosen is
found by running the model on the complete data. The order and the settings are fixed: the same data give the
same bytes.
"""

import argparse
import json
import lzma
import os
import re
import shutil
from pathlib import Path

import golden
import golden_programs
import numpy as np
from golden import CUT, NAMES, VOCABULARY, WEIGHTS
from safetensors.numpy import save

from v4flash.checkpoint.published import TOKEN_MAP_NAME
from v4flash.checkpoint.safetensors_file import SafetensorsFile
from v4flash.checkpoint.shards import CheckpointFiles

LAYERS = {"v4-tiny": (2, 3), "v41-tiny": (1, 2, 6)}
LAYER_PROMPT = 300
DRAFT_PROMPTS = {"v4-tiny": (5, 300), "v41-tiny": (3, 300)}
NOT_KEPT = ("stage_streams", "main_x")  # large, and every other result of the drafter follows from them
BY_TOKEN = re.compile(r"(embed|head)\.weight|.*\.markov_.*\.weight|.*\.tid2eid")
_EXPERT = re.compile(r"(layers|mtp)\.(\d+)\.ffn\.experts\.(\d+)\.")
_OWNER = re.compile(r"(layers|mtp)\.(\d+)\.")
_Item = tuple[str, np.ndarray, bool]


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes tests/data/golden from the complete golden data.")
    parser.add_argument("complete", type=Path, help="folder with README.md, v4-tiny, v41-tiny, dspark, qat")
    complete = parser.parse_args().complete
    os.environ[golden.VARIABLE] = str(complete)
    for name in NAMES:
        (CUT / name).mkdir(parents=True, exist_ok=True)
        for file in ("config.json", TOKEN_MAP_NAME):
            if (complete / name / file).is_file():
                shutil.copyfile(complete / name / file, CUT / name / file)
        golden.packed_path(name).write_bytes(pack(kept_tensors(name)))
    for file in ("formats.safetensors", "pieces.safetensors"):
        shutil.copyfile(complete / file, CUT / file)
    for file, digest in golden.digests().items():
        print(f'    "{file}": "{digest}",  # {(CUT / file).stat().st_size:,} bytes')


def kept_tensors(name: str) -> dict[str, _Item]:
    """{name: (dtype, array, whether it is indexed by token id)} of everything that is kept of one checkpoint."""
    used = used_ids(name)
    tensors: dict[str, _Item] = {VOCABULARY: ("I32", np.asarray(used, np.int32), False)}
    experts = used_experts(name)
    files = CheckpointFiles.open(golden.complete_folder() / name)
    for tensor, info in sorted(files.tensors.items()):
        owner, expert = _OWNER.match(tensor), _EXPERT.match(tensor)
        if owner and owner[1] == "layers" and int(owner[2]) not in LAYERS[name]:
            continue
        if expert and (expert[1], int(expert[2]), int(expert[3])) not in experts:
            continue
        if owner or BY_TOKEN.fullmatch(tensor):
            by_token = BY_TOKEN.fullmatch(tensor) is not None
            tensors[WEIGHTS + tensor] = (info.dtype, np.asarray(files.tensor(tensor)), by_token)
    for file in (f"{name}/golden", f"qat/{name}", f"dspark/{name}"):
        opened = SafetensorsFile(golden.complete_folder() / f"{file}.safetensors")
        for key, info in opened.tensors.items():
            kept = kept_result(name, file, key, opened.tensor(key), used)
            if kept is not None:
                tensors[f"{file}/{key}"] = (info.dtype, kept, False)
    return tensors


def kept_result(name: str, file: str, key: str, value: np.ndarray, used: list[int]) -> np.ndarray | None:
    """The part of a result that is kept, or None."""
    what = key.rsplit(".", 1)[-1]
    if file.endswith("golden"):
        return value if what in ("ids", "engram_rows") else None
    if file.startswith("qat"):
        is_layer = f".L{LAYER_PROMPT}.layer_from_embed" in key
        return value[list(LAYERS[name])] if is_layer else None
    if int(key[1:].split(".")[0]) not in DRAFT_PROMPTS[name] or what in NOT_KEPT:
        return None
    return value[:, used] if what.endswith("logits") else value


def used_ids(name: str) -> list[int]:
    """Token ids that occur in the prompts of single layers and as anchors, noise or drafts."""
    drafts = golden.read(f"dspark/{name}")
    ids = set(golden.read(f"{name}/golden")[f"L{LAYER_PROMPT}.ids"].tolist())
    for key, value in drafts.items():
        if key.endswith((".anchor", "draft_ids")) and int(key[1:].split(".")[0]) in DRAFT_PROMPTS[name]:
            ids.update(value.tolist())
    config = golden_programs.loaded(golden.complete_folder() / name, False).config
    return sorted(ids | {config.draft.noise_token_id})


def used_experts(name: str) -> set[tuple[str, int, int]]:
    """('layers' or 'mtp', its number, expert) of every expert that a compared row chooses, in either mode."""
    path, used = golden.complete_folder() / name, set()
    prompt = golden.read(f"{name}/golden")[f"L{LAYER_PROMPT}.ids"]
    drafts = golden.read(f"dspark/{name}")
    for quantise in (False, True):
        routes = golden_programs.walk(path, quantise, LAYERS[name], prompt, alone=True).routes
        for layer, chosen in zip(LAYERS[name], routes, strict=True):
            used.update(("layers", layer, int(expert)) for expert in chosen.flat)
        for n in DRAFT_PROMPTS[name]:
            for last, start in ((n - 1, f"L{n}.round1"), (n + 2, f"L{n}.round2")):
                first = int(drafts[f"L{n}.taps_first_pos"][0])
                taps = drafts[f"L{n}.taps"][: last + 1 - first]
                found = golden_programs.draft(path, quantise, taps, first, int(drafts[f"{start}.anchor"][0]))
                for stage, chosen in enumerate(found.routes):
                    used.update(("mtp", stage, int(expert)) for expert in chosen.flat)
    return used


def pack(tensors: dict[str, _Item]) -> bytes:
    """The packed file that `golden.packed` reads."""
    used = tensors[VOCABULARY][1]
    index, values = [], {}
    for name, (dtype, array, by_token) in tensors.items():
        index.append([name, dtype, list(array.shape), by_token])
        held = np.ascontiguousarray(array[used] if by_token else array)
        values.setdefault(dtype, []).append(held.reshape(-1).view(np.uint8).reshape(-1, array.dtype.itemsize))
    planes = {dtype: np.ascontiguousarray(np.concatenate(parts).T) for dtype, parts in values.items()}
    planes["index"] = np.frombuffer(json.dumps(index, separators=(",", ":")).encode(), np.uint8)
    return lzma.compress(save(planes), preset=9 | lzma.PRESET_EXTREME)


if __name__ == "__main__":
    main()
