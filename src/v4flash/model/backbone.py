"""The target model: layers wired from the configuration's layer table.

Knows: the order of embedding, layers, taps and head, and whether a sublayer's collapse weights are its own or
its predecessor's. Does not know: how many rows are prefill, verification or plain decoding; that is only a
row count and a number of live rows.

Source: DeepSeek inference/model.py, V4 and V4.1 (`Transformer`).
"""

import dataclasses
from collections.abc import Callable

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from v4flash.config import LayerConfig, ModelConfig
from v4flash.model.attention import Attention, Choice
from v4flash.model.engram import Engram, compressed_history
from v4flash.model.experts import Experts, MixtureOfExperts, RoutedExperts
from v4flash.model.hyper_connections import HyperConnection, HyperHead, collapse, spread
from v4flash.model.numerics import Norm, Numerics
from v4flash.state import DecodeState, ring_write


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one pass: token ids [T], absolute positions [T], and how many of them are live."""

    tokens: jax.Array
    positions: jax.Array
    count: jax.Array

    @property
    def live(self) -> jax.Array:
        return jnp.arange(self.tokens.shape[0]) < self.count


@dataclasses.dataclass(frozen=True)
class TrunkOutput:
    """What a pass over the layers yields.

    Attributes:
      hidden: [T, D] collapsed streams before the final norm.
      taps: [T, n * D] stream means at the drafter's target layers, concatenated in their listed order.
      routes: per layer, the expert ids [T, K] of each row.
      streams: per layer [T, S, D] after the layer, and collapse weights [T, S] handed on, if asked for.
    """

    hidden: jax.Array
    taps: jax.Array | None
    routes: list[jax.Array]
    streams: list[jax.Array]
    handed_on: list[jax.Array]


def stream_mean(streams: jax.Array) -> jax.Array:
    """Mean over the streams in float32, in the streams' type: [T, D]."""
    return jnp.mean(streams.astype(jnp.float32), axis=1).astype(streams.dtype)


def first_stream(rows: int, streams: int) -> jax.Array:
    """The one-hot collapse weights [T, S] that start delayed mixing."""
    return jnp.zeros((rows, streams), jnp.float32).at[:, 0].set(1.0)


class Layer(nnx.Module):
    """Attention and mixture of experts, each inside hyper-connections."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        numerics: Numerics,
        *,
        experts: int,
        chosen: int,
        routed: RoutedExperts = Experts,
    ):
        self.config, self.layer = config, layer
        self.hc_attn = HyperConnection(config, numerics)
        self.attn_norm = Norm(config.hidden_size, config.rms_norm_eps, numerics)
        self.attn = Attention(config, layer, numerics)
        self.hc_ffn = HyperConnection(config, numerics)
        self.ffn_norm = Norm(config.hidden_size, config.rms_norm_eps, numerics)
        self.ffn = MixtureOfExperts(
            config, numerics, experts=experts, chosen=chosen, hashed=layer.hash_routed, routed=routed
        )
        self.engram = Engram(config, layer.index, numerics) if layer.engram else None

    def sublayer(self, wrap: HyperConnection, norm: Norm, body: Callable, streams: jax.Array, pre: jax.Array):
        """Runs `body` on the collapsed streams; returns new streams and the collapse weights it computed."""
        own, post, comb = wrap(streams)
        used = pre if self.config.delayed_mixing else own
        return spread(post, comb, body(norm(collapse(used, streams))), streams), own

    def feed_forward(
        self, streams: jax.Array, pre: jax.Array, rows: Rows
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The mixture-of-experts sublayer: new streams, the collapse weights it hands on, expert ids [T, K]."""
        routes: list[jax.Array] = []

        def mix(x: jax.Array) -> jax.Array:
            output, ids = self.ffn(x, rows.tokens, rows.live)
            routes.append(ids)
            return output

        with jax.named_scope("ffn"):
            streams, own = self.sublayer(self.hc_ffn, self.ffn_norm, mix, streams, pre)
        return streams, own, routes[0]

    def __call__(
        self, streams: jax.Array, pre: jax.Array, rows: Rows, state: DecodeState, choice: Choice
    ) -> tuple[jax.Array, jax.Array, jax.Array, DecodeState, Choice]:
        """One backbone layer over streams [T, S, D]; `pre` [T, S] is the predecessor's collapse.

        Returns new streams, collapse weights, expert ids [T, K], the written state and the shared choice.
        """
        written: list = []

        def attend(x: jax.Array) -> jax.Array:
            output, *rest = self.attn(x, state, rows.positions, rows.count, choice)
            written.extend(rest)
            return output

        with jax.named_scope("attention"):
            streams, pre = self.sublayer(self.hc_attn, self.attn_norm, attend, streams, pre)
        streams, pre, routes = self.feed_forward(streams, pre, rows)
        return streams, pre, routes, *written


class Backbone(nnx.Module):
    """Embedding, layers, final norm and head of the target model; `routed` makes its routed experts."""

    def __init__(self, config: ModelConfig, numerics: Numerics, routed: RoutedExperts = Experts):
        self.config, self.numerics = config, numerics
        shape = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(jnp.zeros(shape, numerics.plain))
        self.head = nnx.Param(jnp.zeros(shape, numerics.plain))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps, numerics)
        self.hc_head = None if config.delayed_mixing else HyperHead(config, numerics)
        self.layers = nnx.List(
            Layer(
                config,
                layer,
                numerics,
                experts=config.n_routed_experts,
                chosen=config.num_experts_per_tok,
                routed=routed,
            )
            for layer in config.layers
        )
        self.token_map = (
            nnx.Variable(jnp.arange(config.vocab_size, dtype=jnp.int32)) if config.engram else None
        )

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """Equal streams [T, S, D] of the tokens' embeddings."""
        rows = self.embed[...][tokens].astype(self.numerics.dtype)
        return jnp.broadcast_to(rows[:, None], (rows.shape[0], self.config.hc_mult, rows.shape[1]))

    def trunk(
        self, tokens: jax.Array, state: DecodeState, count: jax.Array, *, keep_streams: bool = False
    ) -> tuple[TrunkOutput, DecodeState]:
        """Runs tokens int32 [T] at positions state.length.. through all layers; the first `count` are live.

        The state comes back with the live rows written but not committed: `DecodeState.advance` does that.
        """
        config = self.config
        rows = Rows(tokens, state.length + jnp.arange(tokens.shape[0], dtype=jnp.int32), count)
        state = state.replace(tokens=ring_write(state.tokens, tokens, state.length, count))
        targets = config.draft.target_layer_ids if config.draft else ()
        streams = self.embedded(tokens)
        pre, choice = first_stream(tokens.shape[0], config.hc_mult), Choice()
        taps: dict[int, jax.Array] = {}
        kept: list[jax.Array] = []
        handed: list[jax.Array] = []
        routes: list[jax.Array] = []
        for layer in self.layers:
            index = layer.layer.index
            with jax.named_scope(f"layer_{index}"):
                if layer.engram is not None:
                    history = compressed_history(
                        config.engram, self.token_map[...], state.tokens, rows.positions
                    )
                    streams = layer.engram(streams, history)
                if index in targets and config.taps_are_inputs:
                    taps[index] = stream_mean(streams)
                streams, pre, ids, state, choice = layer(streams, pre, rows, state, choice)
                routes.append(ids)
                if index in targets and not config.taps_are_inputs:
                    taps[index] = stream_mean(streams)
            if keep_streams:
                kept.append(streams)
                handed.append(pre)
        hidden = self.hc_head(streams) if self.hc_head is not None else collapse(pre, streams)
        joined = jnp.concatenate([taps[i] for i in targets], axis=-1) if targets else None
        return TrunkOutput(hidden, joined, routes, kept, handed), state

    def logits(self, hidden: jax.Array, norm: Norm | None = None) -> jax.Array:
        """float32 logits [T, V] of hidden rows [T, D]; `norm` defaults to the final norm."""
        with jax.named_scope("head"):
            x = (norm or self.norm)(hidden)
            return self.numerics.product("td,vd->tv", x, self.head[...].astype(self.numerics.dtype))
