"""GGUF files: metadata to a ModelSpec, and mapped, possibly quantised tensors.

Layouts that differ from ours, from the format's documentation and its converter: Llama's q
and k rows hold rotary neighbours; GPT-2's q, k, v are one matrix, already [outputs, inputs].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from cache_transfer.contract import PositionScheme
from pdserve.engine.checkpoint_files import CheckpointFiles
from pdserve.engine.digest import model_digest
from pdserve.engine.fields import Fields
from pdserve.engine.gguf_header import GgufRecord, read_header
from pdserve.engine.gguf_rope import gguf_rope_scheme
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.spec import ModelSpec
from pdserve.engine.stored import Naming, StoredTensor, assemble
from pdserve.engine.validate import check_spec
from pdserve.engine.weights import Shape
from pdserve.errors import CheckpointError

_ROPE_FREQS = "rope_freqs.weight"
_BLOCK_VALUES = 1 << 20  # values dequantised at a time: bounds the temporaries to a few MiB

_MODULES = {
    "embed": "token_embd",
    "pos": "position_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


@dataclass(frozen=True)
class GgufFamily:
    naming: Naming
    traits: Mapping[str, Any] = field(default_factory=dict)
    eps_key: str = "attention.layer_norm_rms_epsilon"
    learned: bool = False
    options: frozenset[str] = frozenset()  # biases that are there if their tensors are


_PLAIN = Naming(layer="blk.{layer}.", modules=_MODULES)
GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily(
        Naming(layer="blk.{layer}.", modules=_MODULES, paired=frozenset({"q", "k"})),
        options=frozenset({"qkv_bias", "attn_out_bias", "mlp_bias"}),
    ),
    "qwen2": GgufFamily(_PLAIN, {"qkv_bias": True}),
    "qwen3": GgufFamily(_PLAIN, {"qk_norm": True}),
    "gpt2": GgufFamily(
        Naming(
            layer="blk.{layer}.",
            modules={**_MODULES, "q": "attn_qkv", "k": "attn_qkv", "v": "attn_qkv"},
            fused={"q": 0, "k": 1, "v": 2},
        ),
        {
            "norm": "layer",
            "norm_shift": True,
            "mlp": "plain",
            "activation": "gelu_tanh",
            "qkv_bias": True,
            "attn_out_bias": True,
            "mlp_bias": True,
        },
        eps_key="attention.layer_norm_epsilon",
        learned=True,
    ),
}
_BIAS_TENSORS = {"qkv_bias": "attn_q", "attn_out_bias": "attn_output", "mlp_bias": "ffn_up"}
# Metadata outside the architecture's own prefix never changes the forward pass.
_HARMLESS_PREFIXES = ("general.", "tokenizer.", "quantize.", "split.")


@dataclass(frozen=True)
class GgufTensor:
    """A StoredTensor of a mapped, possibly quantised record."""

    record: GgufRecord

    @property
    def dtype(self) -> str:
        return str(self.record.kind.name)

    @property
    def shape(self) -> Shape:
        return self.record.shape

    def raw(self) -> Any:
        return self.record.data.reshape(-1)

    def read(self, dtype: torch.dtype) -> Tensor:
        """Dequantises to fp32 and casts, some rows at a time."""
        stored, name = self.record.data, self.record.name
        values = torch.empty(self.shape, dtype=dtype)
        rows = values.view(stored.shape[0], -1)
        step = max(1, _BLOCK_VALUES // rows.shape[1])
        try:
            for start in range(0, rows.shape[0], step):
                block = gguf.quants.dequantize(stored[start : start + step], self.record.kind)
                rows[start : start + step].copy_(torch.from_numpy(np.array(block, dtype=np.float32)))
        except NotImplementedError as error:
            raise CheckpointError(
                f"tensor {name} is quantised as {self.dtype}",
                field=name,
                reason="UNSUPPORTED_DTYPE",
                remedy="use a file quantised to a type that the gguf library can read, such as Q8_0 or Q4_K",
            ) from error
        return values


def load_gguf(path: Path, dtype: str, device: str, files: CheckpointFiles) -> LoadedModel:
    """Raises CheckpointError naming the file, tensor or metadata key at fault."""
    files.stamp(path)
    metadata, stored = read_gguf(path)
    family, spec = spec_from_metadata(metadata, stored, str(path))
    check_spec(spec)
    digest = model_digest(spec, stored, files.digests(path, stored))
    weights = {name: tensor for name, tensor in stored.items() if name != _ROPE_FREQS}
    tensors = assemble(spec, family.naming.sources(spec), weights, dtype, device)
    return LoadedModel(path.stem, spec, tensors, dtype, digest, path)


def read_gguf(path: Path) -> tuple[Mapping[str, Any], dict[str, StoredTensor]]:
    """Metadata (arrays of strings left out: they belong to the tokenizer) and mapped tensors."""
    header = read_header(path)
    return header.metadata, {name: GgufTensor(record) for name, record in header.tensors.items()}


def spec_from_metadata(
    metadata: Mapping[str, Any], stored: Mapping[str, StoredTensor], where: str
) -> tuple[GgufFamily, ModelSpec]:
    """Raises CheckpointError naming the key that is missing, wrong, unsupported or unknown."""
    arch = str(metadata.get("general.architecture"))
    if arch not in GGUF_FAMILIES:
        raise CheckpointError(
            f"{where} is of architecture {arch}",
            field="general.architecture",
            reason="UNKNOWN_ARCHITECTURE",
            remedy=f"supported are {', '.join(GGUF_FAMILIES)}",
        )
    family = GGUF_FAMILIES[arch]
    fields = Fields(metadata, where)
    vocab_size = _vocab_size(fields, arch, stored)
    heads = fields.integer(f"{arch}.attention.head_count")
    width = fields.integer(f"{arch}.embedding_length")
    layers = fields.integer(f"{arch}.block_count")
    head_dim = _head_dim(fields, arch, width, heads)
    context = fields.integer(f"{arch}.context_length")
    traits = dict(family.traits) | {
        name: f"blk.0.{_BIAS_TENSORS[name]}.bias" in stored for name in sorted(family.options)
    }
    spec = ModelSpec(
        vocab_size=vocab_size,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=fields.integer(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn_width=fields.integer(f"{arch}.feed_forward_length"),
        context_limit=context,
        positions=_positions(fields, arch, family, head_dim, context, stored),
        norm_eps=_single(fields.number(f"{arch}.{family.eps_key}")),
        tied_head="output.weight" not in stored,
        bos_id=fields.integer("tokenizer.ggml.bos_token_id", None, minimum=0),
        eos_ids=_eos(fields),
        **traits,
    )
    _refuse_rest(fields, arch)
    return family, spec


def _single(value: float) -> float:
    """The shortest decimal of a stored single: 9.999999747378752e-06 was written as 1e-05.

    So a GGUF and a config.json of one model give one spec.
    """
    return float(str(np.float32(value)))


def _positions(
    fields: Fields, arch: str, family: GgufFamily, head_dim: int, context: int, stored: Mapping[str, StoredTensor]
) -> PositionScheme:
    if family.learned:
        return PositionScheme(kind="learned", dims=context)
    factors = stored[_ROPE_FREQS].read(torch.float32).flatten() if _ROPE_FREQS in stored else None
    return gguf_rope_scheme(fields, arch, head_dim, factors)


def _head_dim(fields: Fields, arch: str, width: int, heads: int) -> int:
    key = f"{arch}.attention.key_length"
    if key not in fields and width % heads:
        raise fields.unsupported(f"{arch}.attention.head_count", heads, f"it does not divide the width {width}")
    head_dim = fields.integer(key, width // heads)
    fields.expect(f"{arch}.attention.value_length", (head_dim,))
    return head_dim


def _vocab_size(fields: Fields, arch: str, stored: Mapping[str, StoredTensor]) -> int:
    """The rows of the embedding; metadata may say it too and must agree."""
    if "token_embd.weight" not in stored:
        raise CheckpointError(
            "tensor token_embd.weight is missing",
            field="token_embd.weight",
            reason="MISSING_TENSOR",
            remedy="the checkpoint is incomplete; fetch it again",
        )
    vocab_size = stored["token_embd.weight"].shape[0]
    fields.expect(f"{arch}.vocab_size", (vocab_size,))
    return vocab_size


def _eos(fields: Fields) -> tuple[int, ...]:
    """The end of text, and the end of a turn or message where the file has them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [fields.integer(f"tokenizer.ggml.{key}", None, minimum=0) for key in keys]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _refuse_rest(fields: Fields, arch: str) -> None:
    fields.expect("general.type", ("model",))
    fields.expect("split.count", (0, 1))
    fields.expect(f"{arch}.expert_count", (0,))
    fields.expect(f"{arch}.expert_used_count", (0,))
    fields.expect(f"{arch}.use_parallel_residual", (False,))
    fields.expect(f"{arch}.attention.causal", (True,))
    fields.expect(f"{arch}.tensor_data_layout", ("reference",))
    fields.finish(lambda key: key.startswith(_HARMLESS_PREFIXES))
