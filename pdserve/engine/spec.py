"""A decoder-only model described as data. No torch: the ledger and the loaders read it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from cache_transfer.contract import AttentionScheme, CachePlane, PositionScheme


@dataclass(frozen=True)
class LayerShape:
    """Heads of one layer.

    Without KV heads it caches nothing: its query heads are the normed input itself, which the output projection takes.
    Without query heads there is nothing in attention's place, and no norm before it.
    """

    heads: int  # query heads
    kv_heads: int  # divides heads; query head h reads KV head h * kv_heads // heads
    head_dim: int
    kernel: int = 0  # tokens of a short convolution (convolution.py): one head as wide as the stream; 0: attention

    @property
    def planes(self) -> tuple[CachePlane, ...]:
        if not self.kv_heads:
            return ()
        if self.kernel:
            return (CachePlane("conv", self.kv_heads, self.head_dim),)
        return CachePlane("k", self.kv_heads, self.head_dim), CachePlane("v", self.kv_heads, self.head_dim)


@dataclass(frozen=True)
class ModelSpec:
    """Everything `model.py` needs to run a decoder, and nothing about how it is stored.

    Widths are scalars per token. `norm_order` says where a layer's norms stand; `f` is attention, then the MLP:

        pre        x + f(norm(x))
        post       norm(x + f(x))
        branch     x + norm(f(x))
        sandwich   x + norm(f(norm(x)))

    `parallel` lets both read the layer's input: x + attention(norm(x)) + mlp(other norm(x)); with `one_norm` both norms
    are the same.
    """

    vocab_size: int
    width: int  # residual stream
    layers: int
    heads: int  # query heads; as the next two, of every layer unless `layer_shapes` says otherwise
    kv_heads: int
    head_dim: int  # need not be width / heads
    ffn_width: int
    context_limit: int  # positions the model is defined for
    positions: PositionScheme
    norm: str = "rms"  # rms | layer
    norm_eps: float = 1e-5
    norm_scale: bool = True  # learned scale
    norm_shift: bool = False  # learned shift (layer norm)
    norm_order: str = "pre"  # pre | post | branch | sandwich
    final_norm: bool = True
    mlp: str = "gated"  # gated | plain
    activation: str = "silu"  # silu | gelu | gelu_tanh | relu | relu2 (its square)
    qkv_bias: bool = False
    attn_out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False  # RMS norm over head_dim of q and k, before positions
    tied_head: bool = False
    embed_width: int = 0  # 0: width; else an input projection embed_width -> width
    out_width: int = 0  # 0: width; else an output projection width -> out_width before the head
    projection_bias: bool = False  # of the input and output projections
    attention_scale: float = 0.0  # 0: head_dim ** -0.5
    sliding_window: tuple[int, ...] = ()  # per layer, tokens seen; 0 or (): all
    soft_cap: float = 0.0  # of attention scores; 0: none
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    # Fields from here on change nothing at their defaults.
    layer_positions: tuple[PositionScheme, ...] = ()  # per layer, where layers differ; (): `positions` everywhere
    parallel: bool = False  # attention and MLP read the same x; of norm_order pre
    norm_offset: float = 0.0  # added to every learned scale of a norm
    qk_norm_whole: bool = False  # the q/k norm is over all heads together
    embed_norm: bool = False  # a norm after the embedding
    embed_scale: float = 1.0  # factor on the embedding
    residual_scale: float = 1.0  # factor on what attention and MLP add
    logit_scale: float = 1.0  # factor on the logits
    logit_soft_cap: float = 0.0  # of the logits; 0: none
    experts: int = 0  # MLPs of each layer; 0: one, without a router
    active_experts: int = 0  # that each token takes
    expert_width: int = 0  # inner width of one expert
    norm_experts: bool = False  # the weights of the experts taken are scaled to add up to 1
    dense_layers: tuple[int, ...] = ()  # layers with one MLP of ffn_width all the same
    one_norm: bool = False  # of a parallel layer: the MLP has no norm of its own
    qk_norm_each: bool = False  # the q/k norm is a layer norm without shift, with a scale for each head
    sigmoid_router: bool = False  # weights are sigmoids, not a softmax; a stored correction is added for the choice
    shared_width: int = 0  # inner width of an expert that every token takes as well, times sigmoid(gate); 0: none
    attention_sinks: bool = False  # a learned score per query head takes its share of the softmax and gives nothing
    expert_bias: bool = False  # of the router and of every expert
    # Experts are (up + 1) * gate * sigmoid(alpha * gate), gate at most limit and up within +-limit; 0: act(gate) * up.
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0
    layer_shapes: tuple[
        LayerShape, ...
    ] = ()  # per layer, where layers differ; (): heads, kv_heads, head_dim everywhere
    conv_bias: bool = False  # of short convolutions and their projections
    layer_ffn: tuple[int, ...] = ()  # per layer, where layers differ; (): ffn_width everywhere
    kv_layers: tuple[int, ...] = ()  # per layer, the one whose K and V it reads, of its shape; (): each its own
    key_is_value: tuple[int, ...] = ()  # layers whose V is K before its norm and rotation
    v_norm: bool = False  # RMS norm over head_dim of v, without a scale
    layer_scale: bool = False  # a learned factor on each layer's output
    layer_input_width: int = 0  # of the embeddings that each layer adds for itself (layer_extras.py); 0: none
    experts_beside: bool = False  # experts and MLP in the same layer, each with norms of its own (layer_extras.py)

    @property
    def scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5

    def window(self, layer: int) -> int:
        """Tokens a query of this layer sees, itself included; 0: all."""
        return self.sliding_window[layer] if self.sliding_window else 0

    def shape_of(self, layer: int) -> LayerShape:
        return self.layer_shapes[layer] if self.layer_shapes else self._shape

    @cached_property
    def _shape(self) -> LayerShape:
        return LayerShape(self.heads, self.kv_heads, self.head_dim)

    def scale_of(self, layer: int) -> float:
        """Factor on the scores of this layer."""
        return self.attention_scale or self.shape_of(layer).head_dim ** -0.5

    def ffn_of(self, layer: int) -> int:
        return self.layer_ffn[layer] if self.layer_ffn else self.ffn_width

    def kv_layer(self, layer: int) -> int:
        """Whose K and V this layer reads: most often its own."""
        return self.kv_layers[layer] if self.kv_layers else layer

    def has_kv(self, layer: int) -> bool:
        """Whether this layer makes K and V, and caches them."""
        return self.kv_layer(layer) == layer and self.shape_of(layer).kv_heads > 0

    def positions_of(self, layer: int) -> PositionScheme:
        return self.layer_positions[layer] if self.layer_positions else self.positions

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense_layers

    def unusual(self) -> dict[str, object]:
        """Field -> value of everything that is not at its default; fields without one included."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def attention_scheme(self) -> AttentionScheme:
        windows = tuple(self.window(layer) for layer in range(self.layers))
        return AttentionScheme(scale=self.scale, soft_cap=self.soft_cap, sliding_window=windows)

    def planes(self) -> tuple[tuple[CachePlane, ...], ...]:
        """Of each layer; () where it caches nothing."""
        return tuple(self.shape_of(layer).planes if self.has_kv(layer) else () for layer in range(self.layers))


def shape_fields(shapes: Sequence[LayerShape]) -> dict[str, Any]:
    """The fields of a spec whose layers have these shapes; what it says of all is that of the first with attention."""
    first = next((shape for shape in shapes if shape.kv_heads and not shape.kernel), shapes[0])
    unequal = tuple(shapes) if first.kernel or any(shape != first for shape in shapes) else ()
    return {
        "heads": first.heads, "kv_heads": first.kv_heads, "head_dim": first.head_dim, "layer_shapes": unequal
    }  # fmt: skip


def ffn_fields(widths: Sequence[int]) -> dict[str, Any]:
    """The fields of a spec whose layers have MLPs of these widths."""
    return {"ffn_width": max(widths), "layer_ffn": tuple(widths) if len(set(widths)) > 1 else ()}
