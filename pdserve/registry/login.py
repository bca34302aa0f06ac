"""User, password and TLS files of a Redis, kept out of the configuration file's URL.

A password is a secret: here it exists only on its way into the URL that the client takes, which
nobody prints, and no error shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from pdserve.errors import ConfigError
from pdserve.registry.settings import RegistrySettings

# Settings -> the names that redis-py gives them in a URL.
TLS_FILES = {"ca_file": "ssl_ca_certs", "cert_file": "ssl_certfile", "key_file": "ssl_keyfile"}


def redis_url(url: str, settings: RegistrySettings, environment: Mapping[str, str]) -> str:
    """`url` with what `settings` says of user, password and TLS files; the same url if it says nothing.

    Raises ConfigError for a source of the password that cannot be read or is empty, for one of these
    that `url` has as well, and for TLS files without TLS.
    """
    parts = urlsplit(url)
    password = _password(settings, environment)
    files = {theirs: name for ours, theirs in TLS_FILES.items() if (name := _file(ours, settings))}
    if (settings.username or password) and "@" in parts.netloc:
        raise ConfigError(
            "registry.url has a user or password, and so has the configuration beside it",
            field="registry.url",
            remedy="write the URL as redis://HOST:PORT/DATABASE",
        )
    if files and not parts.scheme.startswith("rediss"):
        raise ConfigError(
            f"{parts.scheme}:// has no TLS, so {', '.join(n for n in TLS_FILES if getattr(settings, n))} mean nothing",
            field="registry.url",
            remedy="write rediss://",
        )
    netloc = parts.netloc
    if settings.username or password:
        netloc = f"{quote(settings.username, safe='')}:{quote(password, safe='')}@{netloc}"
    query = "&".join(filter(None, (parts.query, urlencode(files))))
    return urlunsplit((parts.scheme, netloc, parts.path, query, parts.fragment))


def _password(settings: RegistrySettings, environment: Mapping[str, str]) -> str:
    """Empty: none is configured."""
    variable, file = settings.password_env, settings.password_file
    if variable and file:
        raise ConfigError("there is a password_file, too", field="registry.password_env", remedy="use one of them")
    if variable:
        if not environment.get(variable):
            raise ConfigError(
                f"the variable {variable} is not set or empty", field="registry.password_env", remedy="set it"
            )
        return environment[variable]
    if not file:
        return ""
    try:
        password = Path(file).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"cannot read {file}: {reason}", field="registry.password_file", remedy="name a readable file"
        ) from None
    if not password:
        raise ConfigError(f"{file} is empty", field="registry.password_file", remedy="write the password to it")
    return password


def _file(name: str, settings: RegistrySettings) -> str:
    """The path of a TLS file, which is there; empty: none is configured."""
    path = str(getattr(settings, name))
    if path and not Path(path).is_file():
        raise ConfigError(f"there is no file {path}", field=f"registry.{name}", remedy="name a PEM file")
    return path
