"""The library's front door: load a checkpoint, generate text, keep sessions.

Knows: how checkpoint, tokenizer, chat encoding and pinned programs come together, and how text streams out of
token steps. Does not know: the terminal.

    model = v4flash.load("demo")
    for step in model.generate("def fibonacci(n):", raw=True, max_tokens=64):
        print(step.text, end="", flush=True)
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from v4flash.checkpoint.loading import LoadedModel
from v4flash.config import ModelConfig
from v4flash.engine import backends, opening, programs, speculation_file, ways
from v4flash.engine.backends import Backend
from v4flash.engine.session import Session, TokenStep
from v4flash.engine.statistics import Statistics
from v4flash.errors import CheckpointError, UsageError
from v4flash.model.numerics import Numerics
from v4flash.placement.table import Placement
from v4flash.speculative.depth import MAX_DRAFT, DepthPolicy
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.lookup import LookupPolicy
from v4flash.speculative.randomness import seed_key
from v4flash.speculative.stream import Control
from v4flash.text import ChatEncoding, ReasoningSplitter, StopMatcher, StreamDecoder, Tokenizer
from v4flash.text.chat import conversation, encode_segments, segments_text

DEFAULT_ROWS, DEFAULT_CONTEXT = 8, 4096
DECODE_AT_LOAD_BYTES = 1 << 30
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
RULES = ("block", "token")
_PLAIN = Backend(backends.XLA)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as the model sees it: token ids, the text they came from, and whether it opened reasoning."""

    ids: list[int]
    text: str
    thinking: bool = False


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step of a generation.

    Attributes:
      text: what became safe to print with this step (may be empty inside a split character).
      parts: the same text as (kind, text) pieces, kind 'reasoning' or 'content'.
      tokens: the emitted ids; the first `accepted` of them were drafted, the last is the target's own.
      drafts, confidence: the verified drafts and the drafter's predicted acceptance.
      position: absolute position of the first emitted token.
      copied: whether the drafts were copied from the text (lookup) instead of drafted.
    """

    text: str
    parts: list[tuple[str, str]]
    tokens: list[int]
    drafts: list[int]
    confidence: list[float]
    accepted: int
    position: int
    copied: bool = False


class Generation:
    """An iterator of StepRecords; `statistics` and `text` are complete once it is exhausted."""

    def __init__(
        self,
        records: Iterator[StepRecord],
        statistics: Statistics,
        prompt: Prompt,
        splitter: ReasoningSplitter,
    ):
        self._records = records
        self._splitter = splitter
        self.statistics = statistics
        self.prompt = prompt
        self.tokens: list[int] = []
        self.text = ""
        self.reasoning = ""

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> StepRecord:
        record = next(self._records)
        self.tokens += record.tokens
        for kind, text in record.parts:
            if kind == "reasoning":
                self.reasoning += text
            else:
                self.text += text
        return record

    @property
    def reasoning_open(self) -> bool:
        """True while the text so far ends inside the reasoning."""
        return self._splitter.unfinished

    def close(self) -> None:
        """Ends the generation; its session keeps what was yielded."""
        self._records.close()


class LanguageModel:
    """A loaded checkpoint with its pinned programs.

    Attributes:
      params: the weights as the programs take them: an nnx.State, or with backend 'fused' a
        PackedModel. `programs.model(params)` is the model in either case.
      backend, backend_note: 'xla' or 'fused', with '+host' or another way behind it where experts are not resident,
        and what a person should know about that choice, or None.
      placement: where the routed experts live; None where all are resident.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pinned: programs.Programs,
        backend: Backend = _PLAIN,
        speculation: speculation_file.SpeculationFile | None = None,
        placement: Placement | None = None,
    ):
        self.config = loaded.config
        self.numerics = loaded.numerics
        self.path = loaded.path
        self.params = loaded.params
        self.programs = pinned
        self.backend, self.backend_note = backend.label, backend.note
        self.placement = placement
        self.speculation = speculation or speculation_file.SpeculationFile()
        has_tokenizer = (loaded.path / "tokenizer.json").is_file()
        self.tokenizer = Tokenizer.from_dir(loaded.path) if has_tokenizer else None

    @property
    def draft_limit(self) -> int:
        """The most drafts per step (k) of the compiled programs; 0 without a drafter."""
        return self.programs.draft_limit

    @property
    def mode(self) -> str:
        return "qat" if self.numerics.quantise else "exact"

    def place_experts(self, wanted: Placement) -> int:
        """Moves routed experts until those that are hot in `wanted` are hot here; returns how many came.

        Sessions go on where they are, with the same text: only arrays change, and nothing is compiled.
        Raises UsageError where all experts are resident, or for a table of other shapes.
        """
        if self.placement is None:
            raise UsageError("all experts are resident: there is nothing to move")
        _, swaps = self.placement.towards(wanted)
        for layer in sorted({layer for layer, _, _ in swaps}):
            pairs = [(leaving, coming) for own, leaving, coming in swaps if own == layer]
            self.placement = self.programs.exchange(self.params, self.placement, layer, pairs)
        return len(swaps)

    def session(self) -> Session:
        """An empty session."""
        return Session(
            self.programs, self.params, programs.new_state(self.config, self.numerics, self.programs.shapes)
        )

    def encode(
        self,
        text: str,
        *,
        raw: bool = False,
        think: str = "off",
        system: str | None = None,
        encoding: str | None = None,
    ) -> Prompt:
        """The prompt's ids: plain text behind the begin token (raw), or one user message in the chat encoding."""
        tokenizer = self._require_tokenizer()
        return encode_prompt(
            tokenizer, self.path, self.config, text, raw=raw, think=think, system=system, encoding=encoding
        )

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise CheckpointError(
                f"no tokenizer.json in {self.path}; text needs one (token ids work without)"
            )
        return self.tokenizer

    @property
    def step_costs(self) -> list[float] | None:
        """Measured milliseconds of a step by live rows that hold for these programs, if there are any."""
        dtype = jnp.dtype(self.numerics.dtype).name
        rows = self.programs.shapes.rows
        return self.speculation.costs_for(jax.devices()[0].device_kind, self.backend, dtype, rows)

    def depth_policy(self, adaptive: bool, temperature: float) -> DepthPolicy:
        """How many drafts are verified: chosen in every step, or always those wanted. `temperature` is the text's.

        Without measured costs every row counts as free, so that an adaptive policy verifies all.
        """
        known = {}
        found = self.speculation.calibration_for(temperature)
        if found is not None:
            known = {"slope": found.slope, "bias": found.bias, "acceptance": found.acceptance}
        if self.step_costs:
            known["costs"] = self.step_costs
        return DepthPolicy.make(adaptive=adaptive, **known)

    def control(
        self,
        *,
        k: int | str = "auto",
        sampling: SamplingParams | None = None,
        seed: int = 0,
        stop_ids: tuple = (),
        rule: str = "block",
        draft_sampling: SamplingParams | None = None,
        lookup: bool = False,
        repeat_limit: int = 0,
    ) -> Control:
        """The data arguments of a step; the options are those of `generate`."""
        limit, draft = self.draft_limit, self.config.draft
        adaptive = k == "auto"
        if adaptive:
            k = min(draft.block_size, limit) if draft else 0
        if not isinstance(k, int) or not 0 <= k <= limit:
            hint = (
                f"load with more rows (up to k = {MAX_DRAFT})" if draft else "this checkpoint has no drafter"
            )
            raise UsageError(f"k is {k!r}, this program takes 0 to {limit}; {hint}")
        if rule not in RULES:
            raise UsageError(f"rule is {rule!r}, expected {' or '.join(RULES)}")
        if lookup and not draft:
            raise UsageError("lookup needs a checkpoint with a drafter; leave it out")
        if repeat_limit < 0 or repeat_limit == 1:
            raise UsageError(f"repeat_limit is {repeat_limit}, expected 0 (off), or 2 and more")
        sampling = sampling or SamplingParams.make(temperature=0.0)
        return programs.make_control(
            k,
            max(k, min(draft.block_size, limit)) if draft else 0,
            sampling,
            seed_key(seed),
            stop_ids,
            draft_sampling=draft_sampling,
            blockwise=rule == "block",
            depth=self.depth_policy(adaptive, float(sampling.temperature)),
            lookup=LookupPolicy.make(on=lookup, length=limit if adaptive else k),
            repeat_limit=repeat_limit,
        )

    def generate(
        self,
        prompt: str | Prompt | list[int],
        *,
        session: Session | None = None,
        k: int | str = "auto",
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int = 0,
        max_tokens: int = 256,
        stop: tuple[str, ...] = (),
        raw: bool = False,
        think: str = "off",
        system: str | None = None,
        ignore_eos: bool = False,
        rule: str = "block",
        draft_temperature: float | None = None,
        lookup: bool = False,
        repeat_limit: int = 0,
    ) -> Generation:
        """Generates behind `prompt` in `session`, or in a new one.

        None of k, rule, draft_temperature and lookup changes the law of the text, nor a greedy text at all.

        Args:
          prompt: text, an encoded prompt, or token ids.
          k: drafts verified in a step; 'auto' chooses in every step, up to the drafter's trained block, by
            confidence and measured costs (`v4flash advise --out`), and verifies all where none were measured.
          temperature, top_p, top_k, min_p, seed: sampling; temperature 0 is greedy. A sampled text repeats with
            its seed, options and k.
          max_tokens, stop, ignore_eos: where the text ends.
          raw, think, system: how a prompt given as text is encoded.
          rule: 'block' judges a step's drafts together, 'token' one by one; only sampled text is concerned.
          draft_temperature: temperature of the law that drafts are drawn from (filters stay those of the text);
            0 drafts greedily; None takes the text's.
          lookup: also propose what followed the newest tokens earlier in the text.
          repeat_limit: ends the text ('repeated') when one token came this often in a row; 0 never does.

        Raises UsageError for values outside their range, CapacityError when the prompt exceeds the context.
        """
        if isinstance(prompt, str):
            prompt = self.encode(prompt, raw=raw, think=think, system=system)
        elif not isinstance(prompt, Prompt):
            prompt = Prompt([int(token) for token in prompt], "")
        if max_tokens < 0:
            raise UsageError(f"max_tokens is {max_tokens}, expected 0 or more")
        bad = next((token for token in prompt.ids if not 0 <= token < self.config.vocab_size), None)
        if bad is not None:
            raise UsageError(
                f"prompt holds token id {bad}, the vocabulary has ids 0 to {self.config.vocab_size - 1}"
            )
        filters = {"top_p": top_p, "top_k": top_k, "min_p": min_p}
        sampling = SamplingParams.make(temperature=temperature, **filters)
        draft_sampling = sampling
        if draft_temperature is not None:
            draft_sampling = SamplingParams.make(temperature=draft_temperature, **filters)
        stop_ids = () if ignore_eos else (self.config.eos_token_id,)
        control = self.control(
            k=k,
            sampling=sampling,
            seed=seed,
            stop_ids=stop_ids,
            rule=rule,
            draft_sampling=draft_sampling,
            lookup=lookup,
            repeat_limit=repeat_limit,
        )
        statistics = Statistics(k=int(control.draft_length), seed=seed)
        session = session or self.session()
        steps = session.generate(prompt.ids, control, max_tokens, statistics)
        splitter = ReasoningSplitter(prompt.thinking)
        records = self._records(steps, session, tuple(stop), stop_ids, statistics, splitter)
        return Generation(records, statistics, prompt, splitter)

    def _records(
        self,
        steps: Iterator[TokenStep],
        session: Session,
        stop: tuple,
        skip: tuple,
        statistics: Statistics,
        splitter: ReasoningSplitter,
    ) -> Iterator[StepRecord]:
        """Turns token steps into text, cutting at the earliest stop string."""
        if self.tokenizer is None:
            if stop:
                self._require_tokenizer()
            for step in steps:
                yield StepRecord("", [], **dataclasses.asdict(step))
            return
        # Embedding rows past the tokenizer's last id are padding: they have no text.
        silent = (*skip, *range(self.tokenizer.vocab_size, self.config.vocab_size))
        decoder, matcher = StreamDecoder(self.tokenizer, skip=silent), StopMatcher(stop)
        try:
            for step in steps:
                text, used = "", 0
                for token in step.tokens:
                    text += matcher.push(decoder.push([token]))
                    used += 1
                    if matcher.stopped:
                        break
                last = matcher.stopped or statistics.finish in ("eos", "length", "context", "repeated")
                if last and not matcher.stopped:
                    text += matcher.push(decoder.flush()) + matcher.flush()
                pieces = splitter.push(text) + (splitter.flush() if last else [])
                parts = [(piece.part, piece.text) for piece in pieces]
                if matcher.stopped:
                    statistics.finish = "stop"
                    statistics.cut(used, len(step.tokens), step.accepted, len(step.drafts), step.copied)
                text = "".join(text for _, text in parts)
                kept = dataclasses.replace(step, tokens=step.tokens[:used], accepted=min(step.accepted, used))
                yield StepRecord(text, parts, **dataclasses.asdict(kept))
                if matcher.stopped:
                    steps.close()
                    session.rewind(step.position + used)
                    return
        finally:
            steps.close()


def encode_prompt(
    tokenizer: Tokenizer,
    path: Path,
    config: ModelConfig,
    text: str,
    *,
    raw: bool = False,
    think: str = "off",
    system: str | None = None,
    encoding: str | None = None,
) -> Prompt:
    """The prompt of one message for the checkpoint at `path`, without loading it.

    Args: raw, plain text behind the begin token instead of a conversation; think and system, of the
    conversation; encoding, one of `v4flash.text.ENCODINGS` instead of the checkpoint's own.
    """
    if raw:
        return Prompt([tokenizer.bos_id, *tokenizer.encode_text(text)], text)
    chat = ChatEncoding.for_checkpoint(path, config.family, encoding)
    segments = chat.render(conversation(text, system), think)
    return Prompt(encode_segments(tokenizer, segments), segments_text(segments), think != "off")


def load(
    path: str | Path,
    *,
    context: int | None = None,
    rows: int = DEFAULT_ROWS,
    chunk: int | None = None,
    mode: str | None = None,
    dtype: str | None = None,
    backend: str = backends.AUTO,
    experts: str = ways.RESIDENT,
    hot_experts: int | None = None,
    expert_stats: str | Path | None = None,
    drafter: bool = True,
    compile_cache: bool = True,
    speculation: str | Path | None = None,
    progress: Callable[[str], Any] | None = None,
    note: Callable[[str], Any] | None = None,
) -> LanguageModel:
    """Loads a checkpoint folder (published safetensors or a converted one) and pins its programs.

    Args:
      path: the folder.
      context: positions kept; by default 4,096 or the checkpoint's own limit if that is smaller.
      rows: rows of a verifying pass; k goes up to rows - 1, and to 9 at most.
      chunk: rows of a prefill pass, by default 128; passes of backend 'fused' have 8.
      mode: 'exact' or 'qat' (simulated quantisation); by default what the checkpoint asks for.
      dtype: 'float32' or 'bfloat16'; by default float32 on a CPU and bfloat16 elsewhere.
      backend: 'xla', plain modules; 'fused', hand-fused launches on weights that are packed after loading, layer by
        layer: the most memory in use is that of the checkpoint plus about three times its largest layer's; 'auto',
        fused where device, packages and checkpoint allow it.
      experts: where routed experts live: 'resident', all on the first device; 'host', some in the host's memory,
        fetched when a row chooses them; 'peer', some on a second GPU; 'sidecar', some on any second device. The text
        is the same.
      hot_experts: experts of each layer that stay on the first device, where not all do.
      expert_stats: file of `v4flash experts profile --out` that says which; by default the first of each layer.
      drafter: False leaves the drafter out (k = 0 only).
      compile_cache: keep compiled programs on disk.
      speculation: file of `v4flash advise --out`; by default speculation.json in the folder, if there is one.
      progress: called with a sentence at the start of each phase.
      note: called with a sentence where 'auto' did not choose fused, or a fused run differs from what was asked for;
        by default a Python warning, but none on a CPU, where nobody expects fused launches.

    Raises CapacityError where backend 'fused' is asked for and cannot run, saying why.
    """
    say = progress or (lambda sentence: None)
    path = Path(path)
    config = ModelConfig.from_file(path)
    numerics = choose_numerics(path, config, mode, dtype)
    context = min(context or DEFAULT_CONTEXT, config.max_position_embeddings)
    if rows < 2 or (chunk is not None and chunk < 1) or context < 2:
        raise UsageError(f"rows {rows}, chunk {chunk}, context {context}: expected at least 2, 1 and 2")
    measured = speculation_file.read(Path(speculation)) if speculation else speculation_file.beside(path)
    cache = programs.cache_folder() if compile_cache else None
    wanted = ways.Wanted(experts, hot_experts, expert_stats)
    placement = wanted.placement(config)
    loaded, pinned, chosen = opening.open_checkpoint(
        path,
        numerics,
        backend=backend,
        rows=rows,
        chunk=chunk,
        context=context,
        drafter=drafter,
        cache=cache,
        say=say,
        experts=wanted,
        placement=placement,
    )
    if chosen.note:
        tell = note or (warnings.warn if jax.default_backend() != "cpu" else say)
        tell(f"backend {chosen.name}: {chosen.note}")
    return LanguageModel(loaded, pinned, chosen, measured, placement)


def choose_numerics(path: Path, config: ModelConfig, mode: str | None, dtype: str | None) -> Numerics:
    """Number types for this checkpoint and device; small checkpoints are decoded once, at load."""
    if mode not in (None, "exact", "qat"):
        raise UsageError(f"mode is {mode!r}, expected exact or qat")
    if dtype not in (None, *DTYPES):
        raise UsageError(f"dtype is {dtype!r}, expected {' or '.join(DTYPES)}")
    quantise = config.simulated_quantisation if mode is None else mode == "qat"
    kind = DTYPES[dtype] if dtype else jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    stored = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return Numerics(dtype=kind, quantise=quantise, packed=stored > DECODE_AT_LOAD_BYTES)
