"""The flags of `pdserve generate`, and what they say: the prompt, the sampling, and the door it goes through."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pdserve.cli.ask import ApiKey, Plaintext, TlsFolder
from pdserve.errors import InvalidRequest
from pdserve.request import JSON_SCHEMA, LARK, REGEX, Grammar, SamplingParams
from pdserve.tokenizer.bundle import SAMPLING_NAMES

Option = typer.Option


@dataclass(frozen=True)
class PromptFlags:
    prompt: Annotated[
        list[str] | None,
        typer.Argument(help="The prompt. '-', or nothing with a pipe, reads standard input. Several are one request."),
    ] = None
    chat: Annotated[
        bool, Option("--chat", help="Send the prompt as one user message through the chat template: one turn.")
    ] = False
    system: Annotated[str, Option(help="System message; implies --chat.")] = ""
    messages: Annotated[
        Path | None, Option(help='JSON file with a whole conversation: [{"role": "user", "content": "..."}].')
    ] = None
    tools: Annotated[
        Path | None, Option(help="JSON file with functions to call, as in OpenAI's API; implies --chat.")
    ] = None
    tool_choice: Annotated[str, Option(help="none, auto (default with --tools), required, or one function's name.")] = (
        ""
    )
    one_call: Annotated[bool, Option("--one-call", help="With --tools: the first call only.")] = False
    go_on: Annotated[bool, Option("--continue", help="The last of --messages is the beginning of the answer.")] = False
    no_header: Annotated[bool, Option("--no-header", help="Chat without the header of an answer at its end.")] = False
    token_ids: Annotated[str, Option(help="Prompt as token ids, such as '1,2,3'.")] = ""
    no_special_tokens: Annotated[
        bool, Option("--no-special-tokens", help="Text without what the model wants around it, such as a begin token.")
    ] = False
    echo: Annotated[bool, Option("--echo", help="Print the prompt before the answer.")] = False

    def ask(self) -> dict[str, Any]:
        """The fields of an Ask. Raises InvalidRequest unless there is one of text, messages and token ids."""
        given = [name for name, value in (("--messages", self.messages), ("--token-ids", self.token_ids)) if value]
        if given and self.prompt:
            raise InvalidRequest(f"a prompt and {given[0]} were both given", field="prompt", remedy="give one of them")
        if len(given) > 1:
            problem = "--messages and --token-ids were both given"
            raise InvalidRequest(problem, field="prompt", remedy="give one of them")
        return {**self._prompt(), **self._options()}

    def _prompt(self) -> dict[str, Any]:
        if self.messages:
            return {
                "messages": tuple(_read_list(self.messages, "--messages", "messages with role and content", "role"))
            }
        if self.token_ids:
            return {"token_ids": _parse_ids(self.token_ids)}
        texts = self.prompt or []
        is_chat = self.chat or self.system or self.tools
        if len(texts) > 1 and is_chat:
            raise bad("prompt", "a conversation has one", "leave out --chat, --system and --tools, or give one prompt")
        if len(texts) > 1:
            return {"prompts": tuple(texts)}
        if not texts and sys.stdin.isatty():
            raise InvalidRequest("there is no prompt", field="prompt", remedy="give one, or pipe it to standard input")
        text = sys.stdin.read() if texts in ([], ["-"]) else texts[0]
        if not is_chat:
            return {"text": text}
        head = ({"role": "system", "content": self.system},) if self.system else ()
        return {"messages": (*head, {"role": "user", "content": text})}

    def _options(self) -> dict[str, Any]:
        """Those that were set: what is not, the server decides."""
        set_by_hand: dict[str, Any] = {
            "continue_final_message": self.go_on or None,
            "add_generation_prompt": False if self.no_header else None,
            "add_special_tokens": False if self.no_special_tokens else None,
            "echo": self.echo or None,
            "parallel_tool_calls": False if self.one_call else None,
        }
        if self.tools:
            set_by_hand["tools"] = _read_list(self.tools, "--tools", "functions with a type", "type")
        if self.tools or self.tool_choice:
            set_by_hand["tool_choice"] = _tool_choice(self.tool_choice or "auto")
        return {"options": {name: value for name, value in set_by_hand.items() if value is not None}}


@dataclass(frozen=True)
class SamplingFlags:
    max_tokens: Annotated[
        int | None, Option(help="Most output tokens; default: until the model ends, at most what the context leaves.")
    ] = None
    min_tokens: Annotated[int, Option(help="No stop before this many output tokens.")] = 0
    temperature: Annotated[float | None, Option(help="0 is greedy. Default of this and what follows: the model's.")] = (
        None
    )
    top_k: Annotated[int | None, Option(help="Sample among the k best tokens; 0: all.")] = None
    top_p: Annotated[float | None, Option(help="Sample among the best tokens that hold this probability together.")] = (
        None
    )
    min_p: Annotated[float | None, Option(help="Drop tokens less probable than this share of the best one.")] = None
    repetition_penalty: Annotated[float | None, Option(help="Over prompt and output; 1: none.")] = None
    presence_penalty: Annotated[float, Option(help="Over output; between -2 and 2.")] = 0.0
    frequency_penalty: Annotated[float, Option(help="Over output, per occurrence; between -2 and 2.")] = 0.0
    logit_bias: Annotated[list[str] | None, Option(help="ID=BIAS, added to a token's score. Repeatable.")] = None
    seed: Annotated[int | None, Option(help="Makes sampling repeatable.")] = None
    stop: Annotated[list[str] | None, Option(help="String that ends the output. Repeatable.")] = None
    stop_token_id: Annotated[list[int] | None, Option(help="Token id that ends the output. Repeatable.")] = None
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on past the model's end token.")] = False
    logprobs: Annotated[int | None, Option(help="Log probabilities of each token and of the n best.")] = None
    json_schema: Annotated[str, Option(help="The output is JSON that this schema allows: JSON text, or @FILE.")] = ""
    regex: Annotated[str, Option(help="The output matches this expression.")] = ""
    grammar: Annotated[str, Option(help="The output follows this grammar, in llguidance's Lark; @FILE reads one.")] = ""

    @property
    def unset(self) -> frozenset[str]:
        """Options that are left to the model's own defaults."""
        return frozenset(name for name in SAMPLING_NAMES if getattr(self, name) is None)

    def params(self) -> SamplingParams:
        """Raises InvalidRequest for a value out of range."""
        sampling = SamplingParams(
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_parse_bias(self.logit_bias or []),
            seed=self.seed,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_id or ()),
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            grammar=_parse_grammar(self.json_schema, self.regex, self.grammar),
            **{name: getattr(self, name) for name in SAMPLING_NAMES - self.unset},
        )
        sampling.check()
        return sampling


@dataclass(frozen=True)
class DoorFlags:
    model: Annotated[str, Option(help="Served model name; empty: the only one. With --local: a checkpoint.")] = ""
    n: Annotated[int, Option(help="Answers, each printed when it is whole. The prompt is computed once.")] = 1
    record: Annotated[bool, Option("--record", help="Print the handoff record at the end.")] = False
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per event instead of text.")] = False
    local: Annotated[bool, Option("--local", help="Run in this process: no server, no handoff.")] = False
    gateway: Annotated[str, Option(help="host:port of a gateway; empty: the running `pdserve up`.")] = ""
    api_key: ApiKey = ""
    tls: TlsFolder = None
    plaintext: Plaintext = False
    config: Annotated[Path | None, Option(help="TOML file; with --local it says which model and how.")] = None
    timeout_s: Annotated[float, Option(help="Seconds until the request is given up.")] = 600.0


def bad(name: str, problem: str, remedy: str = "see pdserve generate --help") -> InvalidRequest:
    return InvalidRequest(problem, field=name, remedy=remedy)


def _tool_choice(given: str) -> Any:
    if given in ("none", "auto", "required"):
        return given
    return {"type": "function", "function": {"name": given}}


def _read_list(path: Path, flag: str, what: str, key: str) -> list[dict[str, Any]]:
    """A JSON list of objects that all have `key`, a text. Raises InvalidRequest saying `what` it should have been."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise bad(flag, f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise bad(flag, f"{path} is not a list of {what}") from error
    if isinstance(found, list) and all(isinstance(m, dict) and isinstance(m.get(key), str) for m in found):
        return found
    raise bad(flag, f"{path} is not a list of {what}")


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError as error:
        raise bad("--token-ids", f"{text!r} is not a list of integers") from error


def _parse_bias(pairs: list[str]) -> dict[int, float]:
    found = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError as error:
            raise bad("--logit-bias", f"{pair!r} is not ID=BIAS") from error
    return found


def _parse_grammar(json_schema: str, regex: str, lark: str) -> Grammar | None:
    given = [(JSON_SCHEMA, json_schema), (REGEX, regex), (LARK, lark)]
    found = [Grammar(kind, _text_or_file(text, kind)) for kind, text in given if text]
    if len(found) > 1:
        raise bad("--json-schema", "only one of --json-schema, --regex and --grammar can be followed")
    return found[0] if found else None


def _text_or_file(text: str, kind: str) -> str:
    if kind == REGEX or not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise bad(f"--{kind.replace('_', '-')}", f"cannot read {text[1:]}: {error}") from error
