"""What a chat request offers the model to call, and the sampling that this takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pdserve.errors import InvalidRequest
from pdserve.request import LARK, MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from pdserve.tokenizer import Tokenizer
from router.openai_json import refused
from router.tool_formats import FORMATS, ToolFormat, format_of


@dataclass(frozen=True)
class ToolUse:
    """The functions, and whether the model has to call one."""

    functions: tuple[Mapping[str, Any], ...]  # each with a name, and perhaps parameters
    required: bool = False
    strict: bool = False  # arguments always fit the parameters
    several: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function["name"] for function in self.functions)

    def check_grammar(self, grammar: Grammar | None, field: str) -> None:
        """Raises InvalidRequest for an output that has to fit something besides calls; `field` asked for it."""
        if grammar is not None:
            raise refused(field, "it contradicts tools", "leave one out, or set tool_choice to none")

    def adapt(self, tokenizer: Tokenizer | None, sampling: SamplingParams) -> SamplingParams:
        """The sampling that makes calls readable, and those that have to come come.

        Raises InvalidRequest for a model whose way to call functions is not known.
        """
        form = self.format(tokenizer)

        def mark(text: str) -> str:
            special = None if tokenizer is None else tokenizer.special_id(text)
            return json.dumps(text) if special is None else f"<[{special}]>"

        if mark(form.marker) != json.dumps(form.marker):  # otherwise it would not be seen in the text
            sampling = replace(sampling, skip_special_tokens=False)
        if not (self.required or self.strict):
            return sampling
        start = form.rules(mark, self.several) if self.required else form.free_rules(mark)
        calls = [f"call{n}: {form.call_rule(function, mark)}" for n, function in enumerate(self.functions)]
        grammar = "\n".join((start, "call: " + " | ".join(f"call{n}" for n in range(len(calls))), *calls))
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            problem = f"their parameters make a grammar of more than {MAX_GRAMMAR_BYTES} bytes"
            raise refused("tools", problem, "offer fewer, or leave the choice to the model", "TOOLS_TOO_LARGE")
        return replace(sampling, grammar=Grammar(LARK, grammar))

    def format(self, tokenizer: Tokenizer | None) -> ToolFormat:
        known = format_of(tokenizer.bundle.chat_template) if tokenizer is not None else None
        if known is None or tokenizer is None or not tokenizer.takes_tools:
            listed = ", ".join(form.name for form in FORMATS)
            raise InvalidRequest(
                "this model's chat template takes no tools, or its calls have an unknown form",
                reason="NO_TOOLS",
                field="tools",
                remedy=f"leave them out, or use a model of a known form: {listed}",
            )
        return known
