"""A conversation in the terminal. Ctrl-C stops an answer, Ctrl-D ends the conversation.

.venv/bin/pdserve up &                  # wait for "ready:"
.venv/bin/python examples/chat.py --system "You answer in one sentence."
"""

from __future__ import annotations

import argparse
from contextlib import closing

from pdserve.client import Client, Finish, Tokens
from pdserve.errors import PdserveError


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with a model.")
    parser.add_argument("--gateway", default="127.0.0.1:8470", help="host:port")
    parser.add_argument("--system", default="", help="what the model is told before the conversation")
    parser.add_argument("--temperature", type=float, default=0.2, help="0 gives the same answers every time")
    options = parser.parse_args()

    messages = [{"role": "system", "content": options.system}] if options.system else []
    with Client(options.gateway) as client:
        while line := ask():
            messages.append({"role": "user", "content": line})
            try:
                answer = stream_answer(client, messages, options.temperature)
            except PdserveError as error:
                print(f"error: {error}")
                messages.pop()  # as if it had not been asked
            else:
                messages.append({"role": "assistant", "content": answer})


def ask() -> str:
    """What the user says next; empty at the end of the conversation."""
    while True:
        try:
            if line := input("you: ").strip():
                return line
        except (EOFError, KeyboardInterrupt):
            print()
            return ""


def stream_answer(client: Client, messages: list[dict[str, str]], temperature: float) -> str:
    """Prints the answer as it comes. Each turn sends the whole conversation, of which the workers keep the cache."""
    text = ""
    # Closing the generator ends the request, so that after Ctrl-C no worker goes on with it.
    with closing(client.generate(messages=messages, temperature=temperature)) as events:
        try:
            for event in events:
                if isinstance(event, Tokens):
                    text += event.text
                    print(event.text, end="", flush=True)
                elif isinstance(event, Finish):
                    usage = event.usage
                    print(f"\n[{usage.prompt_tokens} prompt tokens, {usage.cached_prompt_tokens} from the cache]")
        except KeyboardInterrupt:
            print(" [stopped]")
    return text


if __name__ == "__main__":
    main()
