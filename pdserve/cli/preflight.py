"""What `pdserve up` can find wrong by itself, before it starts anything."""

from __future__ import annotations

from pathlib import Path

from pdserve.config import PACKAGED_MODEL, Config
from pdserve.engine.packaged import model_path
from pdserve.errors import CheckpointError, ConfigError
from pdserve.rpc.settings import check_plaintext

_KINDS = "a Hugging Face directory, a .gguf file or a .pdmodel file"


def check_before_start(config: Config) -> None:
    """Raises ConfigError for an interface that plaintext may not use, and for a model that cannot be read."""
    _check_hosts(config)
    # Pools of a cluster that we join read the model where they run, not here.
    if not config.pools.ray_address:
        _check_model(config.model.path)


def _check_hosts(config: Config) -> None:
    router = config.router
    hosts = (
        ("router.host", router.host, router.rpc),
        ("router.http_host", router.http_interface, router.rpc),
        ("prefill.host", config.prefill.host, config.prefill.rpc),
        ("decode.host", config.decode.host, config.decode.rpc),
    )
    for name, host, rpc in hosts:
        try:
            check_plaintext(host, rpc)
        except ConfigError as error:
            raise ConfigError(error.message, reason=error.reason, field=name, remedy=error.remedy) from error


def _check_model(configured: str) -> None:
    """Headers and configuration only; damaged weights are found by the workers."""
    try:
        path = model_path(configured)
        if not path.exists():
            raise CheckpointError(f"{path} does not exist", field="path", remedy=f"check the path: {_KINDS}")
        if path.is_file() and path.suffix not in (".gguf", ".pdmodel", ".safetensors"):
            raise CheckpointError(f"{path} is not a model", field="path", remedy=f"give {_KINDS}")
        if configured != PACKAGED_MODEL:
            # torch takes seconds to import, and a wrong path is known without it.
            from pdserve.engine.spec_file import read_spec

            read_spec(path)
    except CheckpointError as error:
        raise _for_operator(error, Path(configured)) from error


def _for_operator(error: CheckpointError, path: Path) -> ConfigError:
    """With the setting as its field; the key of the file at fault moves into the text."""
    inside = error.field if error.field not in ("", "path", str(path)) and error.field not in error.message else ""
    text = f"{inside}: {error.message}" if inside else error.message
    where = "" if path.name in text else f"{path}: "
    remedy = error.remedy or f"give {_KINDS}"
    return ConfigError(f"{where}{text}", reason=error.reason, field="model.path", remedy=remedy)
