"""One question, and the two ways to have it answered: through a gateway, or in this process."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from pdserve.cli.console import progress
from pdserve.cli.state import read_running
from pdserve.client import Client, Event, GenerateOptions, Tokens
from pdserve.config import load_config
from pdserve.errors import ConfigError, DeadlineExceeded, InvalidRequest, Unauthenticated, Unavailable
from pdserve.request import SamplingParams
from pdserve.rpc.events import Finish, TokenBatch
from pdserve.rpc.settings import RpcSettings, TlsSettings
from pdserve.tokenizer import Tokenizer, load_bundle

ApiKey = Annotated[
    str,
    typer.Option(
        envvar="PDSERVE_API_KEY",
        show_envvar=True,
        show_default=False,
        help="Key for a gateway that has tenants. The variable keeps it out of the list of processes.",
    ),
]

TlsFolder = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        envvar="PDSERVE_TLS",
        show_envvar=True,
        show_default=False,
        help="Folder with tls.crt, tls.key and ca.crt, for a deployment that uses TLS.",
    ),
]

Plaintext = Annotated[
    bool,
    typer.Option(
        "--plaintext",
        envvar="PDSERVE_PLAINTEXT",
        show_envvar=True,
        help="Reach another machine without encryption, on a network you trust.",
    ),
]


_ROUTERS = ("tools", "tool_choice", "echo")  # options that no process has by itself


@dataclass(frozen=True)
class Ask:
    """One request. Exactly one of text, prompts, messages and token_ids is given."""

    sampling: SamplingParams
    unset: frozenset[str] = frozenset()  # of its options those that are the model's own to say
    text: str | None = None
    prompts: tuple[str, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    token_ids: tuple[int, ...] | None = None
    options: GenerateOptions = field(default_factory=GenerateOptions)  # of the prompt, as the client names them
    model: str = ""
    want_record: bool = False
    timeout_s: float = 600.0
    n: int = 1  # outputs of each prompt

    @property
    def outputs(self) -> int:
        return self.n * (len(self.prompts) or 1)


def gateway_address(given: str) -> str:
    """The address given, else that of the running `pdserve up`; raises Unavailable without either."""
    if given:
        return given
    running = read_running()
    if running is None:
        raise Unavailable(
            "no deployment is running here",
            reason="NOT_UP",
            remedy="start one with `pdserve up`, give --gateway host:port, or use --local",
        )
    return running.gateway


def rpc_settings(tls: Path | None, plaintext: bool = False) -> RpcSettings:
    """How a command connects. Raises ConfigError for certificates that cannot be used."""
    certificates = TlsSettings.of_folder(tls) if tls else TlsSettings()
    return RpcSettings(tls=certificates, allow_plaintext=plaintext)


def ask_gateway(ask: Ask, gateway: str, api_key: str = "", rpc: RpcSettings | None = None) -> Iterator[Event]:
    options: GenerateOptions = {
        **ask.options,
        **_sampling(ask),
        "model": ask.model,
        "timeout_s": ask.timeout_s,
        "want_record": ask.want_record,
        "n": ask.n,
    }
    if ask.messages:
        options["messages"] = ask.messages
    if ask.prompts:
        options["prompts"] = ask.prompts
    if ask.token_ids is not None:
        options["token_ids"] = ask.token_ids
    with flags_named(), Client(gateway_address(gateway), rpc, api_key=api_key) as client:
        yield from client.generate(ask.text, **options)


def _sampling(ask: Ask) -> GenerateOptions:
    """As single options: what is left to the model's own defaults is not among them."""
    given = {f.name: getattr(ask.sampling, f.name) for f in fields(ask.sampling) if f.name not in ask.unset}
    grammar = given.pop("grammar")
    if grammar is not None:
        given[grammar.kind] = grammar.text
    return cast(GenerateOptions, given)


@contextmanager
def flags_named() -> Iterator[None]:
    """Around a call of the client: its remedies name arguments, ours the flags that set them."""
    try:
        yield
    except Unauthenticated as error:
        error.remedy = "set PDSERVE_API_KEY, or give --api-key"
        raise
    except ConfigError as error:
        if error.field == "allow_plaintext":
            error.remedy = "give --tls FOLDER, or --plaintext on a network you trust"
        raise
    except DeadlineExceeded as error:
        if error.field == "timeout_s":
            error.remedy = "raise --timeout-s, or lower --max-tokens"
        raise


def ask_local(ask: Ask, config_path: Path | None) -> Iterator[Event]:
    """Loads the model and answers here. `ask.model`, if given, is the checkpoint's path."""
    # torch takes seconds to import; the other commands do not need it.
    import torch

    from pdserve.engine.checkpoint_files import CheckpointFiles
    from pdserve.engine.engine import Engine
    from pdserve.engine.load import load_model, model_path
    from pdserve.local import LocalRunner

    if ask.want_record:
        raise InvalidRequest("there is no handoff in one process", field="--record", remedy="leave out --local")
    for name, given in (("prompt", ask.prompts), *((f"--{n.replace('_', '-')}", n in ask.options) for n in _ROUTERS)):
        if given:
            raise InvalidRequest("only a router does this", field=name, remedy="leave out --local")
    config = load_config(config_path)
    settings = config.decode
    torch.set_num_threads(settings.engine.threads)
    path = model_path(ask.model or config.model.path)
    with progress(f"loading {path.name}"):
        bundle = load_bundle(path)
        files = CheckpointFiles(settings.engine.keep_digests)
        engine = Engine(load_model(path, settings.engine.dtype, settings.engine.device, files), settings.engine)
    runner = LocalRunner(engine, bundle, chunk_tokens=config.prefill.chunk_tokens)
    sampling = ask.sampling if bundle is None else bundle.with_defaults(ask.sampling, ask.unset)
    yield from _as_text(runner.generate(_local_ids(ask, runner.tokenizer), sampling, n=ask.n), ask.n)


def _as_text(events: Iterable[TokenBatch | Finish], outputs: int) -> Iterator[Event]:
    """Bytes to text across events of each output, as the client does, so that no character is cut in two."""
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(outputs)]
    for event in events:
        if isinstance(event, Finish):
            yield event
        else:
            text = decoders[event.choice].decode(event.text)
            yield Tokens(event.first_index, event.ids, text, event.logprobs, event.choice)


def _local_ids(ask: Ask, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if ask.token_ids is not None:
        return ask.token_ids
    if tokenizer is None:
        raise InvalidRequest("this model has no tokenizer", field="prompt", remedy="use --token-ids")
    if not ask.messages:
        return tokenizer.encode(ask.text or "", add_special=ask.options.get("add_special_tokens", True))
    goes_on = ask.options.get("continue_final_message", False)
    header = ask.options.get("add_generation_prompt", not goes_on)
    return tokenizer.apply_chat(ask.messages, continue_final_message=goes_on, add_generation_prompt=header)
