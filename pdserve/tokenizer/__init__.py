"""Text to ids and back, for workers and router alike; no torch, so a router starts in a second.

bundle.py       everything a tokenizer is, as canonical bytes with a digest
load.py         a model path -> Bundle;  directory.py, gguf_file.py: the two kinds of checkpoint
tokenizer.py    Bundle -> ids;  chat.py: messages -> prompt text, in a sandbox
pieces.py       one id -> the bytes it stands for
detokenizer.py  ids, one at a time -> whole characters
stop.py         stop strings in a stream of bytes
"""

from pdserve.tokenizer.bundle import Bundle
from pdserve.tokenizer.detokenizer import IncrementalDetokenizer
from pdserve.tokenizer.directory import bundle_from_directory
from pdserve.tokenizer.gguf_file import bundle_from_gguf
from pdserve.tokenizer.load import load_bundle
from pdserve.tokenizer.stop import StopMatcher, StopResult
from pdserve.tokenizer.tokenizer import Tokenizer

__all__ = [
    "Bundle",
    "IncrementalDetokenizer",
    "StopMatcher",
    "StopResult",
    "Tokenizer",
    "bundle_from_directory",
    "bundle_from_gguf",
    "load_bundle",
]
