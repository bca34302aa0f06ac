"""What a family of the Hugging Face format is: where each field of ModelSpec stands in its config.json.

families.py holds one value per family, hf_config.py reads a config.json by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.engine.hf_rope import RopeKeys
from pdserve.engine.stored import Naming

REQUIRED = object()

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

# Keys that describe training, generation defaults, other heads or bookkeeping: they do not
# change what a forward pass in inference computes. Everything else is taken or refused.
_BOOKKEEPING = {
    "_name_or_path", "_attn_implementation_autoset", "architectures", "auto_map", "cache_implementation", "dtype",
    "finetuning_task", "is_llama_config", "license", "model_type", "task_specific_params", "tokenizer_class",
    "torch_dtype", "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version",
}  # fmt: skip
_TRAINING = {
    "attention_dropout", "attn_pdrop", "classifier_dropout", "dropout", "embd_pdrop", "gradient_checkpointing",
    "hidden_dropout", "init_std", "initializer_range", "layerdrop", "output_router_logits", "pretraining_tp",
    "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise",
}  # fmt: skip
_GENERATION = {
    "cls_token_id", "decoder_start_token_id", "do_sample", "max_length", "min_length", "num_beams", "pad_token_id",
    "prefix", "repetition_penalty", "sep_token_id", "temperature", "top_k", "top_p", "typical_p", "unk_token_id",
    "use_cache",
}  # fmt: skip
_OTHER_HEADS = {
    "_num_labels", "id2label", "label2id", "num_labels", "output_attentions", "output_hidden_states", "problem_type",
    "return_dict", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj",
}  # fmt: skip
HARMLESS_KEYS = frozenset(_BOOKKEEPING | _TRAINING | _GENERATION | _OTHER_HEADS)

# Keys that would change the computation, with the only values that are supported.
FIXED_KEYS: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),  # 0: the feed-forward is not cut, which is what we do
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "tie_encoder_decoder": (False,),
    "use_bfloat16": (False, True),
}


@dataclass(frozen=True)
class Key:
    """Where one field of ModelSpec stands in a config.json."""

    name: str
    kind: str = "integer"  # integer | number | flag | choice
    default: Any = REQUIRED  # a value, or (field, factor): so many times a field that was read before
    also: str = ""  # another name for the key; both must say the same
    power: float = 1.0  # the field is the value to this power
    meaning: Mapping[Any, Any] = field(default_factory=dict)  # value -> what the field is then; of a choice: all names
    unless: str = ""  # 0 where the value is that of this field
    named: bool = False  # must be there, if only as null, which means the default


@dataclass(frozen=True)
class Family:
    """One architecture: the names its config and tensors use, and what is fixed about it."""

    architecture: str
    model_type: str
    naming: Naming
    keys: Mapping[str, Key]  # ModelSpec field -> where it stands; read in this order
    traits: Mapping[str, Any] = field(default_factory=dict)  # ModelSpec fields that never vary
    head_dim: str = "optional"  # optional | required | derived
    positions: str = "rope"  # rope | learned | alibi | by layer: hf_layers.py reads them
    rope: RopeKeys = field(default_factory=RopeKeys)
    local_rope: RopeKeys | None = None  # of the layers with a window, where these have a scheme of their own
    layers: str = "none"  # hf_layers.py: how the layers are told apart
    pattern: int = 0  # every so many-th layer has no window, if nothing else is said
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()  # further keys that change nothing
    optional_prefix: str = ""  # of tensor names; older files lack it
    packed: bool = False  # the matrices of experts may be in MXFP4
    inner: str = ""  # the key under which the text model stands, in a configuration of several models
    outer: frozenset[str] = (
        frozenset()
    )  # further keys beside it: of the other models, and of tokens that stand for them
