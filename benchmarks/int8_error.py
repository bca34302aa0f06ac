"""What int8 weights do to the logits of bf16 ones, over a text."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import Figure
from pdserve.engine.blocks import BlockManager
from pdserve.engine.engine import Engine
from pdserve.engine.plan import Chunk, StepPlan
from pdserve.tokenizer import Tokenizer, load_bundle

TEXT = Path(__file__).parents[1] / "docs" / "architecture.md"
TOKENS = 384


def int8_error(path: Path, plain: Engine, quantized: Engine) -> list[Figure]:
    """Of each position's next-token distribution, bf16's against int8's."""
    ids = _ids(path, plain.spec.vocab_size)
    ours, theirs = _logits(plain, ids), _logits(quantized, ids)
    log_p, log_q = ours.log_softmax(-1), theirs.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    targets = torch.tensor(ids[1:])[:, None]
    perplexity = [float(torch.exp(-scores[:-1].gather(1, targets).mean())) for scores in (log_q, log_p)]
    same = (ours.argmax(-1) == theirs.argmax(-1)).double().mean()
    difference = ours - theirs
    return [
        Figure("int8 error: mean divergence KL(bf16 || int8) of the next token", float(divergence.mean()), "nats"),
        Figure(
            "int8 error: root mean square difference of a score", float(difference.square().mean().sqrt()), "logits"
        ),
        Figure("int8 error: largest difference of a score", float(difference.abs().max()), "logits"),
        Figure("int8 error: positions whose best token is the same", float(same), "of all"),
        Figure("int8 error: perplexity of a text, against bf16", perplexity[0], "perplexity", perplexity[1]),
    ]


def _ids(path: Path, vocab: int) -> tuple[int, ...]:
    bundle = load_bundle(path)
    if bundle is None:
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randint(vocab, (64,), generator=generator).tolist())
    return tuple(Tokenizer(bundle).encode(TEXT.read_text())[:TOKENS])


def _logits(engine: Engine, ids: tuple[int, ...]) -> Tensor:
    """[n, vocab_size] of every position."""
    blocks = BlockManager(engine.config.pages, engine.config.page_size)
    pages = blocks.allocate("text", blocks.pages_for(len(ids)))
    return engine.step(StepPlan((Chunk("text", ids, 0, pages, "all"),))).logits["text"]
