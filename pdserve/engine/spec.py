"""A decoder-only model described as data. No torch: the ledger and the loaders read it too."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_transfer.contract import AttentionScheme, CachePlane, PositionScheme


@dataclass(frozen=True)
class ModelSpec:
    """Everything `model.py` needs to run a decoder, and nothing about how it is stored.

    Widths are scalars per token. The block order of a pre-norm layer is
    x + attention(norm(x)), then x + mlp(norm(x)); of a post-norm layer
    norm(x + attention(x)), then norm(x + mlp(x)).
    """

    vocab_size: int
    width: int  # residual stream
    layers: int
    heads: int  # query heads
    kv_heads: int  # divides heads; query head h reads KV head h * kv_heads // heads
    head_dim: int  # need not be width / heads
    ffn_width: int
    context_limit: int  # positions the model is defined for
    positions: PositionScheme
    norm: str = "rms"  # rms | layer
    norm_eps: float = 1e-5
    norm_scale: bool = True  # learned scale
    norm_shift: bool = False  # learned shift (layer norm)
    norm_order: str = "pre"  # pre | post
    final_norm: bool = True
    mlp: str = "gated"  # gated | plain
    activation: str = "silu"  # silu | gelu | gelu_tanh | relu
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
    sliding_window: tuple[int, ...] = field(default=())  # per layer, tokens seen; 0 or (): all
    soft_cap: float = 0.0  # of attention scores; 0: none
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5

    def window(self, layer: int) -> int:
        """Tokens a query of this layer sees, itself included; 0: all."""
        return self.sliding_window[layer] if self.sliding_window else 0

    def attention_scheme(self) -> AttentionScheme:
        windows = tuple(self.window(layer) for layer in range(self.layers))
        return AttentionScheme(scale=self.scale, soft_cap=self.soft_cap, sliding_window=windows)

    def planes(self) -> tuple[tuple[CachePlane, ...], ...]:
        layer = (CachePlane("k", self.kv_heads, self.head_dim), CachePlane("v", self.kv_heads, self.head_dim))
        return (layer,) * self.layers
