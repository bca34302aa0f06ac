"""OpenAI's own client: a whole answer, a stream, and what an error looks like.

.venv/bin/pip install openai
.venv/bin/pdserve up &                  # wait for "ready:"
.venv/bin/python examples/openai_client.py "What is the capital of France?"
"""

from __future__ import annotations

import argparse

from openai import APIConnectionError, BadRequestError, OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a question, once in one piece and once as a stream.")
    parser.add_argument("question")
    parser.add_argument("--base-url", default="http://127.0.0.1:8471/v1")
    options = parser.parse_args()
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": options.question}]

    # A router with tenants wants one of its keys; one without takes anything.
    with OpenAI(base_url=options.base_url, api_key="unused") as client:
        model = client.models.list().data[0].id

        whole = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=60)
        print(f"{model}: {whole.choices[0].message.content}")

        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            elif chunk.usage:  # the last chunk, which has no choices
                print(f"\n[{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} output tokens]")

        try:
            client.chat.completions.create(model=model, messages=messages, temperature=-1)
        except BadRequestError as error:
            print(f"refused: {error.param}: {error.code}")


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        raise SystemExit("error: nothing answers there; start it with `pdserve up`, or give --base-url") from None
