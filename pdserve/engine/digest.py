"""A model's identity: a digest over its content, never over its path or name.

    BLAKE3(encode(["model", version, options, [[name, dtype, shape, BLAKE3(bytes)], ...]]))

with the spec's options that are not at their defaults (a field added later changes no digest), and the tensors sorted
by name, as stored (before any cast), so that the digest does not depend on how they are split over files or on the
dtype they are loaded in.
"""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3

from cache_transfer.encoding import encode
from pdserve.engine.spec import ModelSpec
from pdserve.engine.stored import StoredTensor

_VERSION = 2


def model_digest(spec: ModelSpec, stored: Mapping[str, StoredTensor], contents: Mapping[str, bytes]) -> bytes:
    """32 bytes.

    Args:
        spec: stands for the configuration: it holds every key that matters, in canonical form.
        contents: `content_digest` of every tensor, as checkpoint_files.py keeps them.
    """
    rows = tuple((name, stored[name].dtype, stored[name].shape, contents[name]) for name in sorted(stored))
    return blake3(encode(("model", _VERSION, spec.unusual(), rows))).digest()


def content_digest(tensor: StoredTensor) -> bytes:
    """32 bytes over the tensor's bytes as stored."""
    return blake3(tensor.raw(), max_threads=blake3.AUTO).digest()
