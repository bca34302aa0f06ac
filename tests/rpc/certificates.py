"""Certificates for tests, made by the command that operators use."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from pdserve.cli.main import app
from pdserve.rpc.settings import RpcSettings, TlsSettings


def make_certificates(folder: Path, *options: str) -> Path:
    """FOLDER/{worker,router,operator,client}; signs again when FOLDER has an authority."""
    result = CliRunner().invoke(app, ["certificates", str(folder), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return folder


def rpc_of(folder: Path, role: str) -> RpcSettings:
    return RpcSettings(tls=TlsSettings.of_folder(folder / role))
