"""`v4flash draft`: what the drafter proposes behind given token ids, as a file that others can check.

Knows: options and the names in the output file. Does not know: how drafts are computed (fidelity).
"""

import argparse
import dataclasses

from v4flash.cli import logits
from v4flash.cli.options import add, whole
from v4flash.cli.terminal import Messages
from v4flash.errors import UsageError

NAME = "draft"
HELP = "write the drafter's logits, drafts and confidence behind token ids to a safetensors file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    logits.add_parity_arguments(parser)
    add(
        parser,
        "--k",
        help="rows of the block (default: the trained block)",
        env=False,
        type=whole(1),
        metavar="N",
    )
    parser.add_argument(
        "--taps",
        metavar="FILE.safetensors",
        help="use these context rows (taps [rows, n * D], optional taps_first_pos [1]), not the target's own",
    )


def run(options: argparse.Namespace) -> int:
    """Writes anchor, taps, base_logits, logits, draft_ids, confidence_logit and confidence of each list."""
    from v4flash.fidelity import id_lists

    lists = id_lists.read_id_lists(options.ids)
    lists.check_lengths(2, "the last id is the anchor, those before it are the context")
    id_lists.check_output(options.out, overwrite=options.overwrite)
    messages = Messages(options.quiet)
    given = given_taps(options.taps, lists) if options.taps else None
    loaded, cache = logits.load(options, lists, messages, drafter=True)
    if loaded.config.draft is None:
        raise UsageError(f"{loaded.path} has no drafter; give a checkpoint that has one")
    import numpy as np

    from v4flash.fidelity.drafts import DraftPass
    from v4flash.fidelity.logits import TargetPass

    messages.progress("compiling")
    drafter = DraftPass(loaded, options.k or loaded.config.draft.block_size, cache=cache)
    if given is None:
        context = id_lists.rounded_context(map(len, lists.lists))
        target = TargetPass(loaded, context=context, chunk=options.chunk, cache=cache)
    arrays = {}
    for index, ids in enumerate(lists.lists):
        messages.progress(f"list {index + 1} of {len(lists.lists)}")
        *behind, anchor = ids
        first, taps = (0, target(behind).taps) if given is None else given[index]
        found = dataclasses.asdict(drafter(taps, first, anchor))
        arrays[lists.name("anchor", index)] = np.asarray([anchor], np.int32)
        arrays[lists.name("taps", index)] = taps
        arrays |= {lists.name(name, index): value for name, value in found.items()}
    logits.write(options, loaded, arrays, messages)
    return 0


def given_taps(file: str, lists) -> list:
    """(position of the first row, rows) of each list, cut at the end of its context."""
    import numpy as np

    from v4flash.checkpoint.safetensors_file import SafetensorsFile

    stored = SafetensorsFile(file)
    found = []
    for index, ids in enumerate(lists.lists):
        name, context = lists.name("taps", index), len(ids) - 1
        if name not in stored.tensors:
            raise UsageError(f"{file} holds no {name}; it holds {', '.join(stored.tensors) or 'nothing'}")
        taps = np.asarray(stored.tensor(name), np.float32)
        start = lists.name("taps_first_pos", index)
        first = int(stored.tensor(start).reshape(-1)[0]) if start in stored.tensors else context - len(taps)
        if first < 0 or first + len(taps) < context:
            raise UsageError(
                f"{file}: {name} covers positions {first} to {first + len(taps) - 1}, but the context of "
                f"{lists.label(index)} ends at {context - 1}; give rows up to there, and none before position 0"
            )
        found.append((first, np.ascontiguousarray(taps[: context - first])))
    return found
