"""The DSpark drafter: a few layers over one block of rows, a Markov chain over its tokens, and a confidence.

Knows: how the target's taps become context rows, the non-causal block, the serial token bias and the
confidence head. Does not know: how drafts are verified or how many are worth verifying.

    anchor  noise  noise  noise  noise        block inputs at positions P+1 .. P+k
      d1      d2     d3     d4     d5         their predictions, each biased by the token before it

Source: DeepSeek inference/model.py (`DSparkBlock`, V4.1) and the DSpark paper.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from v4flash.config import ModelConfig
from v4flash.model.backbone import Backbone, Layer, Rows, first_stream
from v4flash.model.experts import Experts, RoutedExperts
from v4flash.model.hyper_connections import HyperHead, collapse
from v4flash.model.numerics import Linear, Norm, Numerics
from v4flash.state import DecodeState, ring_write


@dataclasses.dataclass(frozen=True)
class Block:
    """The drafter's parallel part.

    Attributes:
      hidden: g [K, D] before the final norm.
      base_logits: [K, V] float32.
      streams: per stage [K, S, D] after it.
      routes: per stage, the expert ids [K, k] of each row.
    """

    hidden: jax.Array
    base_logits: jax.Array
    streams: list[jax.Array]
    routes: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Drafts:
    """A drafted chain.

    Attributes:
      ids: int32 [K].
      logits: float32 [K, V], biased by the token before.
      confidence: float32 [K], log-odds that a draft is accepted.
      count: int32 [], how many rows were drawn. Behind them ids and logits hold anything, and so do confidences but
        that of the first row there.
    """

    ids: jax.Array
    logits: jax.Array
    confidence: jax.Array
    count: jax.Array


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How the tokens of a block are drawn, one after another.

    Attributes:
      sampling: temperature and filters, as `speculative.filters.SamplingParams`.
      uniforms: () -> float32 [K, 2] in [0, 1), two numbers for each row; asked for where something is drawn.
      laws: (logits [V], sampling) -> law [V], one for each kind of options.
      draw: (law, two uniform numbers) -> token.
      wanted: as in `drawn_chain`; may end a chain early.
      count: int32 [], the most tokens that are wanted.
    """

    sampling: Any
    uniforms: Callable[[], jax.Array]
    laws: Sequence[Callable]
    draw: Callable
    wanted: Callable
    count: jax.Array


class Drafting(NamedTuple):
    """What was drafted for a step.

    Attributes:
      ids: int32 [K], drafts in the first `count` places.
      laws: float32 [K, V], the law each was drawn from; one-hot where it was not drawn.
      confidence: float32 [K], predicted acceptance of each, and of the first one that was not drafted; 0 behind it.
        A drafter's chain gives log-odds, and behind the first that was not drafted anything.
      count: int32 [], how many there are. Like a depth it may depend, for draft i, on the drafts before i alone.
    """

    ids: jax.Array
    laws: jax.Array
    confidence: jax.Array
    count: jax.Array


def chains_by_law(
    chain: Callable, block: Block, anchor: jax.Array, drawing: Drawing
) -> list[Callable[[], Drafting]]:
    """What draws a block's tokens, for each kind of options; `chain` is `drawn_chain` of a drafter's own parts."""

    def by(law: Callable) -> Drafting:
        uniforms = drawing.uniforms()

        def draw(j: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = law(logits, drawing.sampling)
            return drawing.draw(found, picked_row(uniforms, j)), found

        drafts, laws = chain(block, anchor, draw, drawing.wanted)
        return Drafting(drafts.ids, laws, drafts.confidence, drafts.count)

    return [functools.partial(by, law) for law in drawing.laws]


def picked_row(rows: jax.Array, j: jax.Array) -> jax.Array:
    """Row j of [K, N], by a mask: a copied slice would end the capture of a loop."""
    return jnp.sum(jnp.where((jnp.arange(rows.shape[0]) == j)[:, None], rows, 0), axis=0, dtype=rows.dtype)


def drawn_chain(
    block: Block,
    anchor: jax.Array,
    draw: Callable,
    wanted: Callable | None,
    embedded: Callable,
    bias: Callable,
    confidence_logit: Callable,
) -> tuple[Drafts, Any]:
    """Draws the tokens of a block one after another, and no more of them than are wanted.

    A loop that ends, not its turns one by one: every node of a captured graph costs the host time, taken or not. It
    picks and puts rows by masks, for copies of slices would end the capture.

    Args:
      draw: (row int32 [], its logits [V]) -> its token, and anything to keep.
      wanted: (row, confidence logits [K], known up to that of the row) -> bool [], whether the row is drawn; asked in
        order until it says no. None wants all.
      embedded: token -> its Markov embedding [rank].
      bias: embedding of the token before -> bias [V] of a row's logits.
      confidence_logit: (hidden [D], embedding of the token before) -> [].

    Returns: the drafts, and what `draw` kept, stacked over rows, zeros behind the drawn ones.
    """
    turns = block.hidden.shape[0]
    place = jnp.arange(turns, dtype=jnp.int32)

    def put(rows: jax.Array, row: jax.Array, j: jax.Array) -> jax.Array:
        return jnp.where((place == j).reshape(-1, *[1] * row.ndim), row, rows)

    def in_front(j: jax.Array, token: jax.Array, confidence: jax.Array) -> tuple:
        """The token's embedding, the confidences with that of row j behind it, and whether the row is drawn."""
        found = embedded(token)
        confidence = put(confidence, confidence_logit(picked_row(block.hidden, j), found), j)
        drawn = j < turns if wanted is None else (j < turns) & wanted(j, confidence)
        return found, confidence, drawn

    def turn(carry: tuple) -> tuple:
        j, (before, confidence, _), made = carry
        logits = picked_row(block.base_logits, j) + bias(before)
        token, kept = draw(j, logits)
        made = jax.tree.map(lambda rows, row: put(rows, row, j), made, (token, logits, kept))
        return j + 1, in_front(j + 1, token, confidence), made

    first = jnp.int32(0)
    row = jax.eval_shape(lambda: (anchor, block.base_logits[0], draw(first, block.base_logits[0])[1]))
    made = jax.tree.map(lambda x: jnp.zeros((turns, *x.shape), x.dtype), row)
    start = first, in_front(first, anchor, jnp.zeros((turns,), block.base_logits.dtype)), made
    with jax.named_scope("markov_chain"):
        count, (_, confidence, _), made = jax.lax.while_loop(lambda carry: carry[1][2], turn, start)
    ids, logits, kept = made
    return Drafts(ids, logits, confidence, count), kept


class MarkovHead(nnx.Module):
    """Low-rank bias of the next token on the one before it; both tables [V, rank]."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        shape = (config.vocab_size, config.draft.markov_rank)
        self.embed = nnx.Param(jnp.zeros(shape, numerics.plain))
        self.head = nnx.Param(jnp.zeros(shape, numerics.plain))
        self.numerics = numerics

    def embedded(self, token: jax.Array) -> jax.Array:
        """Row of the previous token, float32 [..., rank]."""
        return self.embed[...][token].astype(jnp.float32)

    def bias(self, embedded: jax.Array) -> jax.Array:
        """Logit bias float32 [..., V]."""
        return self.numerics.exact_product("...r,vr->...v", embedded, self.head[...])


class DraftStage(Layer):
    """One drafter layer; the first also projects the taps, the last also holds the heads."""

    def __init__(self, config: ModelConfig, stage: int, numerics: Numerics):
        draft = config.draft
        super().__init__(
            config,
            config.draft_layer(stage),
            numerics,
            experts=draft.n_routed_experts,
            chosen=draft.num_experts_per_tok,
        )
        first, last = stage == 0, stage == draft.stages - 1
        width, eps = config.hidden_size, config.rms_norm_eps
        tapped = len(draft.target_layer_ids) * width
        self.main_proj = Linear(width, tapped, "fp8", config, numerics) if first else None
        self.main_norm = Norm(width, eps, numerics) if first else None
        self.norm = Norm(width, eps, numerics) if last else None
        self.hc_head = HyperHead(config, numerics) if last and not config.delayed_mixing else None
        self.markov_head = MarkovHead(config, numerics) if last else None
        self.confidence = Linear(1, width + draft.markov_rank, "bf16", config, numerics) if last else None

    def over_block(
        self, streams: jax.Array, pre: jax.Array, rows: Rows, ring: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """This stage over block streams [K, S, D]: new streams, collapse weights and expert ids [K, k]."""

        def attend(x: jax.Array) -> jax.Array:
            return self.attn.attend_block(x, ring, last, rows.positions, rows.live)

        with jax.named_scope("attention"):
            streams, pre = self.sublayer(self.hc_attn, self.attn_norm, attend, streams, pre)
        return self.feed_forward(streams, pre, rows)


class Drafter(nnx.Module):
    """All stages of the DSpark drafter; it borrows embedding and head from the target."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        self.config, self.numerics = config, numerics
        self.stages = nnx.List(DraftStage(config, stage, numerics) for stage in range(config.draft.stages))

    def context(self, taps: jax.Array) -> jax.Array:
        """Normalised projection [T, D] of the target's taps [T, n * D]; every stage reads it."""
        first = self.stages[0]
        return first.main_norm(first.main_proj(taps))

    def commit(self, state: DecodeState, taps: jax.Array, start: jax.Array, count: jax.Array) -> DecodeState:
        """Writes context rows of the first `count` (verified) rows, standing at positions start.. ."""
        main = self.context(taps)
        positions = start + jnp.arange(taps.shape[0], dtype=jnp.int32)
        rings = tuple(
            ring_write(ring, stage.attn.window_rows(main, positions), start, count)
            for ring, stage in zip(state.draft_windows, self.stages, strict=True)
        )
        return state.replace(draft_windows=rings)

    def block(
        self, backbone: Backbone, state: DecodeState, anchor: jax.Array, rows: int, live: jax.Array
    ) -> Block:
        """Runs the block [anchor, noise, ...] behind the committed context.

        Args: anchor int32 [], the newest token, at position state.length; rows, the static row count K; live
        int32 [], how many of the rows exist (the others are hidden from all).
        """
        noise = jnp.full((rows,), self.config.draft.noise_token_id, jnp.int32)
        positions = state.length + jnp.arange(rows, dtype=jnp.int32)
        block = Rows(noise.at[0].set(anchor), positions, live)
        streams, pre = backbone.embedded(block.tokens), first_stream(rows, self.config.hc_mult)
        kept, routes = [], []
        for stage, ring in zip(self.stages, state.draft_windows, strict=True):
            with jax.named_scope(f"draft_stage_{stage.layer.index - self.config.num_hidden_layers}"):
                streams, pre, ids = stage.over_block(streams, pre, block, ring, state.length - 1)
            kept.append(streams)
            routes.append(ids)
        last = self.stages[-1]
        hidden = last.hc_head(streams) if last.hc_head is not None else collapse(pre, streams)
        return Block(hidden, backbone.logits(hidden, last.norm), kept, routes)

    def biased_logits(self, base_logits: jax.Array, previous: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Row logits with the bias of the token before them, and that token's Markov embedding."""
        markov = self.stages[-1].markov_head
        embedded = markov.embedded(previous)
        return base_logits + markov.bias(embedded), embedded

    def confidence_logits(self, hidden: jax.Array, embedded: jax.Array) -> jax.Array:
        """Confidence logit of each row from g [..., D] and the previous token's Markov embedding [..., rank]."""
        joined = jnp.concatenate([hidden.astype(jnp.float32), embedded], axis=-1)
        weight = self.stages[-1].confidence.weight[...]
        return self.numerics.exact_product("...k,nk->...n", joined, weight)[..., 0]

    def chain(
        self, block: Block, anchor: jax.Array, draw: Callable, wanted: Callable | None = None
    ) -> tuple[Drafts, Any]:
        """Draws the tokens one after another; arguments and results as in `drawn_chain`."""
        markov = self.stages[-1].markov_head
        return drawn_chain(block, anchor, draw, wanted, markov.embedded, markov.bias, self.confidence_logits)

    def drawn_chains(self, block: Block, anchor: jax.Array, drawing: Drawing) -> list[Callable[[], Drafting]]:
        """What draws the tokens, for each kind of options."""
        return chains_by_law(self.chain, block, anchor, drawing)

    def greedy_chain(self, block: Block, anchor: jax.Array, count: jax.Array) -> Drafts:
        """The first `count` drafts where every token is the likeliest one, the lowest id where several are."""

        def likeliest(j: jax.Array, logits: jax.Array) -> tuple[jax.Array, None]:
            return jnp.argmax(logits).astype(jnp.int32), None

        return self.chain(block, anchor, likeliest, lambda j, confidence: j < count)[0]


class Model(nnx.Module):
    """Target and drafter of one checkpoint; `routed` makes the target's routed experts (the drafter's are few).

    Attributes:
      sampling_laws: None, for it has no way of its own from logits to laws.
    """

    sampling_laws = None

    def __init__(self, config: ModelConfig, numerics: Numerics, routed: RoutedExperts = Experts):
        self.config, self.numerics = config, numerics
        self.backbone = Backbone(config, numerics, routed)
        self.drafter = Drafter(config, numerics) if config.draft else None
