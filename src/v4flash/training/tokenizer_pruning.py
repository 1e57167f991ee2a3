"""Cuts a byte-level BPE tokenizer down to the tokens a corpus uses most, without changing what a token is.

Knows: the tokenizer.json format of the `tokenizers` library as DeepSeek publishes it (vocabulary, merges,
added tokens). Does not know: the corpus (it gets counts), the model, or how chats are framed.

Every token of the result is a token of the original with the same text, and the kept merges keep their
order, so the result is again a valid BPE of the same format.
"""

import copy
import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from v4flash.errors import CheckpointError

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
NOISE = "<｜place▁holder▁no▁0｜>"
_BYTE_TOKENS = 256
# In V4.1 the last placeholder of V4 became the system mark; the published V4 file still has the old name.
_RENAMED = {"<｜place▁holder▁no▁799｜>": SYSTEM}
_CONTROL_FIRST, _CONTROL_LAST = "<｜fim▁hole｜>", "<｜end_of_query｜>"


def added_tokens_to_keep(published: Mapping) -> list[dict]:
    """The control tokens the demonstration keeps, in published order, with the V4.1 spelling of the system
    mark.

    These are: one unused placeholder (the drafter's noise token), the system mark, and every named mark from
    the fill-in-the-middle ones to the end of the text marks. Image and table marks are left out.
    """
    by_name = {token["content"]: token for token in published["added_tokens"]}
    for name in (NOISE, _CONTROL_FIRST, _CONTROL_LAST):
        if name not in by_name:
            raise CheckpointError(
                f"tokenizer.json: expected the added token {name!r}, found none; "
                "use the tokenizer.json that DeepSeek publishes for V4 or V4.1."
            )
    first, last = by_name[_CONTROL_FIRST]["id"], by_name[_CONTROL_LAST]["id"]
    kept = []
    for token in sorted(published["added_tokens"], key=lambda entry: entry["id"]):
        name = _RENAMED.get(token["content"], token["content"])
        if name in (NOISE, SYSTEM) or (first <= token["id"] <= last and "place▁holder" not in name):
            # The system mark is a role mark like its neighbours, which are not flagged special.
            kept.append({**token, "content": name, "special": token["special"] and name != SYSTEM})
    return kept


def class_weighted_counts(counts: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """Mix token counts [V] of several classes so that each class weighs what ``weights`` says, whatever its
    size.
    """
    return sum(weights[name] * count / max(count.sum(), 1) for name, count in counts.items())


def kept_merges(merges: Sequence[tuple[str, str]], usage: Mapping[str, float], keep: int) -> list[int]:
    """Choose the ``keep`` merges whose tokens save most, closed under ancestry; ascending merge numbers.

    Starting from all merges, the least used token that no kept merge needs is removed, and its usage flows
    to the two tokens it falls apart into, until ``keep`` are left. Usage is the (weighted) number of
    occurrences under the full vocabulary, so the value at removal is exactly the number of tokens that the
    removal adds.
    """
    made = {left + right: number for number, (left, right) in enumerate(merges)}
    score = [float(usage.get(left + right, 0.0)) for left, right in merges]
    children = [[made[part] for part in pair if part in made] for pair in merges]
    parents = [0] * len(merges)
    for parts in children:
        for part in parts:
            parents[part] += 1
    alive = [True] * len(merges)
    # Later merges go first among equals: they are the rarer ones in the text the tokenizer was made from.
    leaves = [(score[number], -number) for number in range(len(merges)) if not parents[number]]
    heapq.heapify(leaves)
    for _ in range(len(merges) - keep):
        _, negative = heapq.heappop(leaves)
        number = -negative
        alive[number] = False
        for part in children[number]:
            score[part] += score[number]
            parents[part] -= 1
        for part in set(children[number]):
            if not parents[part]:
                heapq.heappush(leaves, (score[part], -part))
    return [number for number, kept in enumerate(alive) if kept]


def prune(published: Mapping, usage: Sequence[float], base_size: int) -> tuple[dict, list[int]]:
    """Build the pruned tokenizer.json and the table from new ids to published ids.

    ``published`` is the parsed tokenizer.json, ``usage`` [V] the weighted count of every published id,
    ``base_size`` the number of entries before the added tokens (specials, bytes, merges). New ids: 0, 1, 2
    as published, then the 256 bytes, then the kept merges in their order, then the control tokens. Raises
    CheckpointError when the published file is not laid out like that or ``base_size`` leaves no room.
    """
    model = published["model"]
    vocabulary = model["vocab"]
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    by_id = {number: token for token, number in vocabulary.items()}
    fixed = [token["content"] for token in sorted(published["added_tokens"], key=lambda t: t["id"])[:3]]
    first_merge = len(fixed) + _BYTE_TOKENS
    if fixed != [BOS, EOS, PAD] or any(
        by_id.get(first_merge + number) != left + right for number, (left, right) in enumerate(merges)
    ):
        raise CheckpointError(
            "tokenizer.json: expected ids 0..2 for the sentence and padding marks, 256 bytes and then "
            "one entry per merge in order, found another layout; use the tokenizer.json that DeepSeek "
            "publishes for V4 or V4.1."
        )
    if not first_merge <= base_size <= first_merge + len(merges):
        raise CheckpointError(
            f"Pruned vocabulary: expected a size from {first_merge} to {first_merge + len(merges)}, found "
            f"{base_size}."
        )
    usage_by_token = {by_id[number]: value for number, value in enumerate(usage) if number in by_id}
    chosen = kept_merges(merges, usage_by_token, base_size - first_merge)
    real_ids = [*range(first_merge), *(first_merge + number for number in chosen)]
    result = copy.deepcopy(
        {key: value for key, value in published.items() if key not in ("model", "added_tokens")}
    )
    result["model"] = {**{k: v for k, v in model.items() if k not in ("vocab", "merges")}}
    result["model"]["vocab"] = {by_id[real]: new for new, real in enumerate(real_ids)}
    result["model"]["merges"] = [" ".join(merges[number]) for number in chosen]
    specials = sorted(published["added_tokens"], key=lambda t: t["id"])[:3]
    controls = added_tokens_to_keep(published)
    result["added_tokens"] = [*specials, *({**t, "id": base_size + n} for n, t in enumerate(controls))]
    return result, real_ids + [token["id"] for token in controls]


def content_tokenizer(description: Mapping) -> Tokenizer:
    """The same tokenizer without added tokens: whatever text it gets, no control token comes out."""
    return Tokenizer.from_str(json.dumps({**description, "added_tokens": []}))


def usage_counts(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int, batch: int = 64) -> np.ndarray:
    """Count [vocab_size] (int64) how often each id occurs when ``texts`` are encoded without special
    tokens.
    """
    counts = np.zeros(vocab_size, np.int64)
    pending: list[str] = []

    def flush() -> None:
        for encoding in tokenizer.encode_batch(pending, add_special_tokens=False):
            counts[:] += np.bincount(encoding.ids, minlength=vocab_size)
        pending.clear()

    for text in texts:
        pending.append(text)
        if len(pending) == batch:
            flush()
    if pending:
        flush()
    return counts


def tokenizer_config(context: int) -> dict:
    """The tokenizer_config.json of the result: sentence marks are written by the chat encoding, never added
    here.
    """
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_tokenizer(folder: Path, description: Mapping, real_ids: Sequence[int], context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and token_ids.json (list: new id -> published id) to
    ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("tokenizer.json", json.dumps(description, ensure_ascii=False, separators=(",", ":"))),
        ("tokenizer_config.json", json.dumps(tokenizer_config(context), ensure_ascii=False, indent=2)),
        ("token_ids.json", json.dumps(list(real_ids), separators=(",", ":"))),
    ):
        (folder / name).write_text(content + "\n", encoding="utf-8")
