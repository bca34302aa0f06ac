"""`pdserve generate`: one prompt in, text out, through a running deployment or in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from pdserve.cli.ask import ApiKey, Ask, Plaintext, TlsFolder, ask_gateway, ask_local, rpc_settings
from pdserve.cli.console import err, show_logprobs, show_record, write
from pdserve.client import Accepted, Event, Finish, HandoffRecord, Tokens
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.request import JSON_SCHEMA, LARK, REGEX, Grammar, SamplingParams, check_choices
from pdserve.rpc.events import PositionLogprobs

Option = typer.Option
_EVENT_NAMES = {Accepted: "accepted", Tokens: "tokens", HandoffRecord: "handoff_record", Finish: "finish"}


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt. '-', or nothing with a pipe, reads standard input.")
    ] = None,
    chat: Annotated[
        bool, Option("--chat", help="Send the prompt as one user message through the chat template: one turn.")
    ] = False,
    system: Annotated[str, Option(help="System message; implies --chat.")] = "",
    messages: Annotated[
        Path | None, Option(help='JSON file with a whole conversation: [{"role": "user", "content": "..."}].')
    ] = None,
    token_ids: Annotated[str, Option(help="Prompt as token ids, such as '1,2,3'.")] = "",
    model: Annotated[str, Option(help="Served model name; empty: the only one. With --local: a checkpoint.")] = "",
    max_tokens: Annotated[int | None, Option(help="Most output tokens; default: the server's own limit.")] = None,
    min_tokens: Annotated[int, Option(help="No stop before this many output tokens.")] = 0,
    temperature: Annotated[float, Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, Option(help="Sample among the k best tokens; 0: all.")] = 0,
    top_p: Annotated[float, Option(help="Sample among the best tokens that hold this probability together.")] = 1.0,
    min_p: Annotated[float, Option(help="Drop tokens less probable than this share of the best one.")] = 0.0,
    repetition_penalty: Annotated[float, Option(help="Over prompt and output; 1: none.")] = 1.0,
    presence_penalty: Annotated[float, Option(help="Over output; between -2 and 2.")] = 0.0,
    frequency_penalty: Annotated[float, Option(help="Over output, per occurrence; between -2 and 2.")] = 0.0,
    logit_bias: Annotated[list[str] | None, Option(help="ID=BIAS, added to a token's score. Repeatable.")] = None,
    seed: Annotated[int | None, Option(help="Makes sampling repeatable.")] = None,
    n: Annotated[int, Option(help="Answers, each printed when it is whole. The prompt is computed once.")] = 1,
    stop: Annotated[list[str] | None, Option(help="String that ends the output. Repeatable.")] = None,
    stop_token_id: Annotated[list[int] | None, Option(help="Token id that ends the output. Repeatable.")] = None,
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on past the model's end token.")] = False,
    logprobs: Annotated[int | None, Option(help="Log probabilities of each token and of the n best.")] = None,
    json_schema: Annotated[str, Option(help="The output is JSON that this schema allows: JSON text, or @FILE.")] = "",
    regex: Annotated[str, Option(help="The output matches this expression.")] = "",
    grammar: Annotated[
        str, Option(help="The output follows this grammar, in llguidance's Lark; @FILE reads one.")
    ] = "",
    record: Annotated[bool, Option("--record", help="Print the handoff record at the end.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per event instead of text.")] = False,
    local: Annotated[bool, Option("--local", help="Run in this process: no server, no handoff.")] = False,
    gateway: Annotated[str, Option(help="host:port of a gateway; empty: the running `pdserve up`.")] = "",
    api_key: ApiKey = "",
    tls: TlsFolder = None,
    plaintext: Plaintext = False,
    config: Annotated[Path | None, Option(help="TOML file; with --local it says which model and how.")] = None,
    timeout_s: Annotated[float, Option(help="Seconds until the request is given up.")] = 600.0,
) -> None:
    """Ask a model and stream its answer.

    \b
    pdserve generate --chat "What is the capital of France?" --temperature 0
    echo "Once upon a time" | pdserve generate --max-tokens 40 --seed 7
    pdserve generate --token-ids 1,2,3 --ignore-eos --max-tokens 8 --json
    pdserve generate --local "def fib(n):" --max-tokens 60
    """
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_parse_bias(logit_bias or []),
        seed=seed,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        grammar=_parse_grammar(json_schema, regex, grammar),
    )
    sampling.check()
    check_choices(n)
    ask = Ask(
        n=n,
        sampling=sampling,
        model=model,
        want_record=record,
        timeout_s=timeout_s,
        **_parse_prompt(prompt, chat, system, messages, token_ids),
    )
    events = ask_local(ask, config) if local else ask_gateway(ask, gateway, api_key, rpc_settings(tls, plaintext))
    show_events(events if n == 1 or as_json else one_by_one(events), as_json=as_json)


def one_by_one(events: Iterable[Event]) -> Iterator[Event]:
    """Of several answers each as a whole, under its number, before its end."""
    texts: dict[int, list[Tokens]] = {}
    for event in events:
        if isinstance(event, Tokens):
            texts.setdefault(event.choice, []).append(event)
            continue
        if isinstance(event, Finish):
            yield Tokens(0, (), f"[{event.choice}] ")
            yield from texts.pop(event.choice, ())
        yield event


def show_events(events: Iterable[Event], *, as_json: bool = False) -> None:
    """Streams an answer to standard output; the record and the reason to stop go to standard error."""
    if as_json:
        for event in events:
            write(json.dumps(_event_json(event)) + "\n")
        return
    line = _Line()
    logprobs: list[PositionLogprobs] = []
    try:
        for event in events:
            if isinstance(event, Tokens):
                line.write(event.text)
                logprobs += event.logprobs
            elif isinstance(event, HandoffRecord):
                line.end()
                show_record(event)
            elif isinstance(event, Finish):
                line.end(even_if_empty=True)
                show_logprobs(logprobs)
                logprobs.clear()
                usage = event.usage
                err.print(
                    f"[{event.reason}: {usage.prompt_tokens} prompt, {usage.output_tokens} output tokens]", markup=False
                )
    finally:
        line.end()  # an error, or Ctrl-C, in the middle of it


class _Line:
    """The answer's line on standard output, and whether it is still open."""

    def __init__(self) -> None:
        self._open = self._written = False

    def write(self, text: str) -> None:
        if text:
            write(text)
            self._open = self._written = True

    def end(self, *, even_if_empty: bool = False) -> None:
        if self._open or (even_if_empty and not self._written):
            write("\n")
            self._open = False


def _event_json(event: Event) -> dict[str, Any]:
    return {"event": _EVENT_NAMES[type(event)], **asdict(event)}


def _parse_prompt(prompt: str | None, chat: bool, system: str, messages: Path | None, token_ids: str) -> dict[str, Any]:
    """Exactly one of text, messages, token_ids."""
    given = [name for name, value in (("--messages", messages), ("--token-ids", token_ids)) if value]
    if given and prompt is not None:
        raise InvalidRequest(f"a prompt and {given[0]} were both given", field="prompt", remedy="give one of them")
    if len(given) > 1:
        raise InvalidRequest("--messages and --token-ids were both given", field="prompt", remedy="give one of them")
    if messages:
        return {"messages": _read_messages(messages)}
    if token_ids:
        return {"token_ids": _parse_ids(token_ids)}
    if prompt is None and sys.stdin.isatty():
        raise InvalidRequest("there is no prompt", field="prompt", remedy="give one, or pipe it to standard input")
    text = sys.stdin.read() if prompt in (None, "-") else prompt
    if not (chat or system):
        return {"text": text}
    head = ({"role": "system", "content": system},) if system else ()
    return {"messages": (*head, {"role": "user", "content": text})}


def _read_messages(path: Path) -> tuple[dict[str, str], ...]:
    try:
        found = json.loads(path.read_text())
        return tuple({"role": str(m["role"]), "content": str(m["content"])} for m in found)
    except OSError as error:
        raise _bad("--messages", f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise _bad("--messages", f"{path} is not a list of messages with role and content") from error


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError as error:
        raise _bad("--token-ids", f"{text!r} is not a list of integers") from error


def _parse_bias(pairs: list[str]) -> dict[int, float]:
    found = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError as error:
            raise _bad("--logit-bias", f"{pair!r} is not ID=BIAS") from error
    return found


def _parse_grammar(json_schema: str, regex: str, lark: str) -> Grammar | None:
    given = [(JSON_SCHEMA, json_schema), (REGEX, regex), (LARK, lark)]
    found = [Grammar(kind, _text_or_file(text, kind)) for kind, text in given if text]
    if len(found) > 1:
        raise _bad("--json-schema", "only one of --json-schema, --regex and --grammar can be followed")
    return found[0] if found else None


def _text_or_file(text: str, kind: str) -> str:
    if kind == REGEX or not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(f"--{kind.replace('_', '-')}", f"cannot read {text[1:]}: {error}") from error


def _bad(name: str, message: str) -> PdserveError:
    return InvalidRequest(message, field=name, remedy="see pdserve generate --help")
