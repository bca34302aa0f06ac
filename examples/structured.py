"""Output that a program can read: JSON that fits a schema, and text that follows a grammar.

    .venv/bin/pdserve up &                  # wait for "ready:"
    .venv/bin/python examples/structured.py

The form is certain, whatever the model: tokens that do not fit are never drawn. What it says is not.
"""

from __future__ import annotations

import argparse
import json

from pdserve.client import Client
from pdserve.errors import PdserveError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "legs": {"type": "integer", "minimum": 0, "maximum": 100},
        "lives_in": {"enum": ["water", "air", "land"]},
    },
    "required": ["name", "legs", "lives_in"],
    "additionalProperties": False,
}
# In the form of Lark that https://github.com/guidance-ai/llguidance documents.
GRAMMAR = r"""
start: sum " = " number
sum: number (" + " number){1,2}
number: /[1-9][0-9]{0,2}/
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask for JSON, and for a sum.")
    parser.add_argument("--gateway", default="127.0.0.1:8470", help="host:port")
    options = parser.parse_args()

    with Client(options.gateway) as client:
        animal = client.complete(
            messages=[{"role": "user", "content": "Describe a spider as JSON."}],
            json_schema=SCHEMA,
            temperature=0,
            max_tokens=200,
        )
        print(json.loads(animal.text))
        lesson = client.complete("Addition:\n1 + 1 = 2\n2 + 3 = 5\n", lark=GRAMMAR, temperature=0, max_tokens=50)
        print(lesson.text)


if __name__ == "__main__":
    try:
        main()
    except PdserveError as error:
        raise SystemExit(f"error: {error}") from None
