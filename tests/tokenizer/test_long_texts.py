"""Long texts: encoded without stopping other threads, with no threads of the library's own, and bounded unread."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from itertools import pairwise

from pdserve.tokenizer import Tokenizer
from tests.tokenizer.conftest import TEXTS

ALONE = """
import os, psutil
from pdserve.tokenizer import Bundle, Tokenizer
from tests.tokenizer.conftest import byte_level
before = psutil.Process().num_threads()
backend = byte_level()
tokenizer = Tokenizer(Bundle(tokenizer_json=backend.to_str(), vocab_size=backend.get_vocab_size()))
assert tokenizer.encode("hello")
assert psutil.Process().num_threads() == before, psutil.Process().num_threads()
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(0 if tokenizer.encode("hello") else 1)
"""


def test_ids_are_those_of_the_librarys_plain_call(smollm: Tokenizer) -> None:
    for text in (*TEXTS, " ".join(TEXTS)):
        assert (
            list(smollm.encode(text, add_special=False)) == smollm._backend.encode(text, add_special_tokens=False).ids
        )


async def test_a_long_encode_in_a_thread_leaves_the_event_loop_running(smollm: Tokenizer) -> None:
    encoding = asyncio.create_task(asyncio.to_thread(smollm.encode, "word " * 200_000))
    turns = [time.monotonic()]
    while not encoding.done():
        await asyncio.wait({encoding}, timeout=0.001)
        turns.append(time.monotonic())
    longest = max(after - before for before, after in pairwise(turns))
    assert longest < 0.7 * (turns[-1] - turns[0]), longest


def test_the_library_starts_no_threads_and_does_not_warn_of_a_fork() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    out = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, timeout=120)
    assert (out.returncode, out.stderr) == (0, "")


def test_no_text_within_the_tokens_is_beyond_the_bytes(smollm: Tokenizer) -> None:
    longest = max(range(smollm.vocab_size), key=lambda token: len(smollm.token_bytes(token)))
    for text in (*TEXTS, smollm.token_bytes(longest).decode()):
        count = len(smollm.encode(text, add_special=False))
        assert len(text.encode()) <= smollm.most_bytes(count)
