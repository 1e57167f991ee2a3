"""`v4flash decode`: one prompt in, streamed text out, one line of figures at the end.

Knows: options, and which of them contradict each other. Does not know: how text is generated (engine), or how
figures look (terminal).
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from v4flash.cli import options as shared
from v4flash.cli.options import add, number, one_of, whole
from v4flash.cli.terminal import Messages, Printer, closing_line
from v4flash.demo import demo_path
from v4flash.errors import CapacityError, UsageError

NAME = "decode"
HELP = "decode one prompt: text to standard output, everything else to standard error"
SCHEMA = 1
MAX_DRAFT = 9
DEFAULT_ROWS, MORE_ROWS = 8, 16


def _k(text: str) -> int | str:
    return "auto" if text == "auto" else whole(0)(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options. Values: command line, then environment (names in brackets), then defaults."""
    shared.add_checkpoint(parser)
    prompt = parser.add_argument_group("prompt")
    prompt.add_argument("--prompt", metavar="TEXT|-", help="the prompt; - reads standard input")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a UTF-8 file, as it is")
    prompt.add_argument(
        "--raw", action="store_true", help="continue plain text; otherwise it is a chat message"
    )
    prompt.add_argument("--system", metavar="TEXT", help="system message of the chat")
    prompt.add_argument(
        "--think",
        default="off",
        metavar="off|on|LEVEL",
        help="reasoning before the answer, such as on or max",
    )
    prompt.add_argument("--encoding", metavar="NAME", help="chat encoding, instead of the checkpoint's own")
    prompt.add_argument("--show-prompt", action="store_true", help="print what is encoded, and its token ids")
    drafting = parser.add_argument_group("speculation")
    add(
        drafting,
        "--k",
        help=f"drafts verified in a step, 0 to {MAX_DRAFT}; auto chooses in every step, up to the trained block",
        default="auto",
        type=_k,
        metavar="N|auto",
    )
    add(
        drafting,
        "--rows",
        help=f"rows of a verifying pass: k goes up to rows - 1 (default: {DEFAULT_ROWS}, or {MORE_ROWS} for k 8, 9)",
        type=whole(2),
        metavar="N",
    )
    add(
        drafting,
        "--rule",
        help="judge a step's drafts together (block) or one by one (token)",
        default="block",
        **one_of(*shared.RULES),
    )
    add(
        drafting,
        "--draft-temperature",
        help="temperature that drafts are drawn at, 0 drafts greedily (default: that of the text)",
        type=number,
        metavar="T",
    )
    drafting.add_argument(
        "--lookup", action="store_true", help="also draft what followed the newest tokens earlier in the text"
    )
    drafting.add_argument(
        "--speculation",
        metavar="FILE",
        help="measured costs and calibration for --k auto, from `v4flash advise --out` (default: speculation.json "
        "beside the weights)",
    )
    drafting.add_argument(
        "--certificate",
        metavar="FILE",
        help="of `v4flash certify`; without one of these weights, speeds are called unverified (default: "
        "certificate.json beside the weights)",
    )
    sampling = parser.add_argument_group("sampling")
    add(sampling, "--temperature", help="0 is greedy", default=0.0, type=number, metavar="T")
    add(sampling, "--top-p", help="1 is off", default=1.0, type=number, metavar="P")
    add(sampling, "--top-k", help="0 is off", default=0, type=whole(0), metavar="N")
    add(sampling, "--min-p", help="0 is off", default=0.0, type=number, metavar="P")
    add(sampling, "--seed", help="same seed, same text", default=0, type=whole(0, 2**64 - 1), metavar="N")
    ending = parser.add_argument_group("ending")
    add(ending, "--max-tokens", help="new tokens at most", default=256, type=whole(0), metavar="N")
    ending.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable"
    )
    ending.add_argument("--ignore-eos", action="store_true", help="go on behind the end token")
    add(
        ending,
        "--stop-repeats",
        help="end when one token came N times in a row; 0 never does",
        default=0,
        type=whole(0),
        metavar="N",
    )
    running = parser.add_argument_group("running")
    add(
        running,
        "--ctx",
        help="positions kept (default: 4096, or the checkpoint's limit)",
        type=whole(2),
        metavar="N",
    )
    add(
        running,
        "--chunk",
        help="prompt tokens in one pass (default: 128; passes of backend fused have 8)",
        type=whole(1),
        metavar="N",
    )
    shared.add_backend(running)
    shared.add_experts(running)
    shared.add_numbers(running, None)
    shared.add_device(running)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON document on standard output, no text")
    output.add_argument("--quiet", action="store_true", help="nothing on standard error but warnings")


def run(options: argparse.Namespace) -> int:
    """Decodes once."""
    text = prompt_text(options)
    if any(not stop for stop in options.stop):
        raise UsageError("a stop string is empty; give at least one character, or leave --stop out")
    if options.stop_repeats == 1:
        raise UsageError("--stop-repeats 1 would end every text at once; use 0 (off), or 2 and more")
    path = shared.checkpoint_folder(options.ckpt) if options.ckpt else demo_path()
    messages = Messages(options.quiet)

    from v4flash.cli import device as devices

    device = devices.choose(options.device)
    from v4flash.config import ModelConfig
    from v4flash.engine import backends, language_model, programs, speculation_file, ways
    from v4flash.fidelity import certificate_file
    from v4flash.speculative.filters import SamplingParams
    from v4flash.text import Tokenizer

    config = ModelConfig.from_file(path)
    for temperature in (options.temperature, options.draft_temperature or 0.0):
        SamplingParams.make(
            temperature=temperature, top_p=options.top_p, top_k=options.top_k, min_p=options.min_p
        )
    rows, k = pass_rows(options.k, options.rows, config.draft is not None)
    if config.draft and k is not None and k > config.draft.block_size:
        messages.say(past_block(k, config.draft.block_size))
    adaptive = k is None
    k = min(config.draft.block_size if config.draft else 0, rows - 1, MAX_DRAFT) if adaptive else k
    if options.lookup and config.draft is None:
        raise UsageError("--lookup needs a checkpoint with a drafter; leave it out")
    file = options.speculation
    measured = speculation_file.read(Path(file)) if file else speculation_file.beside(path)
    certified = Path(options.certificate) if options.certificate else None
    if certified:
        certificate_file.read(certified)
    tokenizer = Tokenizer.from_dir(path)
    prompt = language_model.encode_prompt(
        tokenizer, path, config, text,
        raw=options.raw, think=options.think, system=options.system, encoding=options.encoding,
    )  # fmt: skip
    if options.show_prompt:
        print(tokenizer.decode(prompt.ids), file=sys.stderr)
        print(f"{len(prompt.ids)} ids: {' '.join(map(str, prompt.ids))}", file=sys.stderr, flush=True)
    context = min(options.ctx or language_model.DEFAULT_CONTEXT, config.max_position_embeddings)
    if options.ctx and context < options.ctx:
        messages.say(
            f"--ctx {options.ctx:,} is more than the checkpoint's {context:,} positions: using {context:,}"
        )
    if len(prompt.ids) > context:
        raise CapacityError(
            f"prompt has {len(prompt.ids):,} tokens, context is {context:,}; shorten the prompt or raise --ctx"
        )
    numerics = language_model.choose_numerics(path, config, options.mode, options.dtype)
    mode = "qat" if numerics.quantise else "exact"
    dtype = numerics.dtype.__name__
    experts = ways.Wanted(options.experts, options.hot_experts, options.expert_stats)
    placement = experts.placement(config)
    backend = ways.suited(backends.choose(options.backend, numerics, rows), options.backend, experts.way)
    # The header gives this reason; what only compiling or packing finds out is said when it is known.
    wanted = backend.name if backend.note and options.backend == "auto" else options.backend
    cache = "off" if options.no_compile_cache else str(programs.cache_folder())
    known = measured.costs_for(device.kind, backend.label, dtype, rows)
    costs = "by measured costs" if known else "all, no costs measured"
    depth = f"k auto, up to {k} ({costs})" if adaptive and k else f"k {k}"
    messages.say(
        f"{path}: {config.family}, {dtype}, {mode} | {device} | "
        f"backend {shown_backend(options.backend, backend)} | "
        f"{shown_experts(options.experts, placement)}{depth}, {rows} rows, context {context:,} | compile cache {cache}"
    )
    if device.remark:
        messages.say(device.remark)

    model = language_model.load(
        path,
        context=context,
        rows=rows,
        chunk=options.chunk,
        mode=options.mode,
        dtype=options.dtype,
        backend=wanted,
        **shared.expert_options(options),
        compile_cache=not options.no_compile_cache,
        speculation=options.speculation,
        progress=messages.progress,
        note=messages.say,
    )
    generation = model.generate(
        prompt,
        k="auto" if adaptive else k,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=options.seed,
        max_tokens=options.max_tokens,
        stop=tuple(options.stop),
        ignore_eos=options.ignore_eos,
        rule=options.rule,
        draft_temperature=options.draft_temperature,
        lookup=options.lookup,
        repeat_limit=options.stop_repeats,
    )
    interrupted = stream(generation, None if options.json else Printer(options.quiet), messages)
    peak = devices.peak_bytes()
    facts = {"device": device.kind, "backend": model.backend, "dtype": dtype, "mode": mode, "rows": rows}
    length = "auto" if k and (adaptive or options.lookup) else k
    standing = certificate_file.standing(path, length, facts, certified)
    figures = generation.statistics.to_json()
    if generation.reasoning_open and prompt.thinking and figures["finish"] in ("length", "context"):
        which = "--max-tokens" if figures["finish"] == "length" else "--ctx"
        messages.say(f"the limit came before the reasoning ended; raise {which} to see an answer")
    if figures["copied"]:
        messages.say(
            f"copied {figures['copied']} drafts from the text, {figures['copied_accepted']} accepted"
        )
    messages.say(
        closing_line(
            figures,
            compile_seconds=model.programs.seconds,
            cached=model.programs.cached,
            peak=peak,
            device=device.platform,
            backend=model.backend,
            certified=str(standing),
        )
    )
    if options.json:
        document = {
            "schema": SCHEMA,
            "text": generation.text,
            "reasoning": generation.reasoning,
            "reasoning_complete": not generation.reasoning_open,
            "token_ids": generation.tokens,
            "prompt": {"text": prompt.text, "token_ids": prompt.ids},
            "statistics": figures,
            "checkpoint": {"path": str(path), "family": config.family},
            "certificate": dataclasses.asdict(standing),
            "settings": {
                "k": k,
                "adaptive": adaptive,
                "rule": options.rule,
                "draft_temperature": options.draft_temperature,
                "lookup": options.lookup,
                "rows": rows,
                "context": context,
                "chunk": model.programs.shapes.chunk,
                "backend": model.backend,
                "experts": options.experts,
                "hot_experts": options.hot_experts,
                "mode": mode,
                "dtype": dtype,
                "temperature": options.temperature,
                "top_p": options.top_p,
                "top_k": options.top_k,
                "min_p": options.min_p,
                "seed": options.seed,
                "max_tokens": options.max_tokens,
                "stop": options.stop,
                "ignore_eos": options.ignore_eos,
                "stop_repeats": options.stop_repeats,
                "raw": options.raw,
                "think": options.think,
                "system": options.system,
            },
            "compile": {"seconds": model.programs.seconds, "cached": model.programs.cached},
            "peak_bytes": peak,
            "device": {"platform": device.platform, "kind": device.kind},
            "versions": versions(),
        }
        print(json.dumps(document, ensure_ascii=False, indent=1), flush=True)
    if interrupted:
        raise KeyboardInterrupt
    return 0


def shown_backend(wanted: str, backend) -> str:
    """The backend as the header names it: why `auto` did not choose fused, unless that was asked for."""
    if wanted != "auto":
        return backend.name
    return f"{backend.name} (auto{': ' + backend.note if backend.note else ''})"


def shown_experts(way: str, placement) -> str:
    """Where experts live, as the header names it; nothing where all are resident."""
    return "" if placement is None else f"experts {way}, {placement.hot} of {placement.experts} hot | "


def stream(generation, printer: Printer | None, messages: Messages) -> bool:
    """Prints what is accepted while it comes; True if Ctrl-C ended it."""
    interrupted = False
    messages.progress("reading the prompt")
    try:
        for record in generation:
            for kind, text in record.parts if printer else ():
                messages.clear()
                printer.write(kind, text)
    except KeyboardInterrupt:
        generation.close()
        interrupted = True
    finally:
        messages.clear()
        if printer:
            printer.finish()
    return interrupted


def prompt_text(options: argparse.Namespace) -> str:
    """The prompt from --prompt, --prompt-file, or a pipe. Raises UsageError for none, two, or no UTF-8."""
    if options.raw:
        for name in ("system", "encoding"):
            if getattr(options, name) is not None:
                raise UsageError(
                    f"--raw continues plain text, so it takes no --{name}; leave one of them out"
                )
        if options.think != "off":
            raise UsageError("--raw continues plain text, so it takes no --think; leave one of them out")
    if options.prompt is not None and options.prompt_file is not None:
        raise UsageError("--prompt and --prompt-file were both given; leave one of them out")
    if options.prompt not in (None, "-"):
        return options.prompt
    if options.prompt_file is not None:
        file = Path(options.prompt_file)
        try:
            return _utf8(file.read_bytes(), str(file))
        except OSError as error:
            raise UsageError(f"cannot read {file} ({error.strerror}); give a text file") from None
    hint = 'no prompt; pass --prompt "TEXT", --prompt - to read standard input, or --prompt-file FILE'
    if options.prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError(hint)
    binary = getattr(sys.stdin, "buffer", None)
    text = _utf8(binary.read(), "standard input") if binary else sys.stdin.read()
    if options.prompt is None and not text:
        raise UsageError(hint)
    return text


def _utf8(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not valid UTF-8 (byte {error.start}); save it as UTF-8") from None


def pass_rows(k: int | str, rows: int | None, has_drafter: bool) -> tuple[int, int | None]:
    """Rows of a verifying pass and the wanted k (None for auto). Raises UsageError past the program's limit."""
    if k == "auto":
        return rows or DEFAULT_ROWS, None
    if k > 0 and not has_drafter:
        raise UsageError(f"k is {k}, but this checkpoint has no drafter; use --k 0")
    if k > MAX_DRAFT:
        raise UsageError(
            f"k is {k}, the limit is {MAX_DRAFT} (with --rows {MORE_ROWS}); choose 0 to {MAX_DRAFT}"
        )
    if rows is not None and k > rows - 1:
        raise UsageError(
            f"k is {k}, the limit of a program with {rows} rows is {rows - 1}; use --rows {MORE_ROWS}"
        )
    return rows or (DEFAULT_ROWS if k < DEFAULT_ROWS else MORE_ROWS), k


def past_block(k: int, block: int) -> str:
    """The note for a k that the drafter was not trained for."""
    places = f"position {k}" if k == block + 1 else f"positions {block + 1}-{k}"
    return f"k={k} goes past the trained block of {block}; watch {places} in the acceptance line"


def versions() -> dict[str, str]:
    """Versions of what decides the result."""
    import importlib.metadata
    import platform

    found = {"python": platform.python_version()}
    for name in ("v4flash", "jax", "jaxlib", "flax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found
