"""A LoRA adapter beside its base model: loaded while the workers serve, asked in one batch with the base, unloaded.

    printf '[model]\nadapter_root = "%s"\n' "$PWD/adapters" > lora.toml     # what may be loaded lies under it
    .venv/bin/pdserve up --config lora.toml &                               # wait for "ready:"
    .venv/bin/python examples/lora.py polite "What is the capital of France?"

`adapters/polite` is a directory that PEFT has written (`model.save_pretrained`) for the model that is served. Adapters
that are always there can stand in the configuration instead: `[model.adapters]`, see docs/adapters.md.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

from pdserve.client import Client
from pdserve.errors import PdserveError


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask the base model and an adapter the same.")
    parser.add_argument("adapter", help="its directory under the workers' adapter_root, and its name")
    parser.add_argument("question")
    parser.add_argument("--gateway", default="127.0.0.1:8470", help="host:port")
    options = parser.parse_args()

    with Client(options.gateway) as client:
        for worker in client.load_adapter(options.adapter, options.adapter):
            if worker.error is not None:
                raise worker.error
        try:
            with ThreadPoolExecutor() as threads:
                names = ("", options.adapter)  # without a name: the base model
                answers = threads.map(lambda name: ask(client, name, options.question), names)
            for name, answer in zip(names, answers, strict=True):
                print(f"{name or 'base'}: {answer}")
        finally:
            client.unload_adapter(options.adapter)


def ask(client: Client, adapter: str, question: str) -> str:
    """With OpenAI's API, `model` is "MODEL:ADAPTER" instead."""
    messages = [{"role": "user", "content": question}]
    return client.complete(messages=messages, adapter=adapter, temperature=0, max_tokens=40).text


if __name__ == "__main__":
    try:
        main()
    except PdserveError as error:
        raise SystemExit(f"error: {error}") from None
