"""Which adapter a request means, and which version of it: by what the workers of the pool say they serve.

A request names a model, MODEL:ADAPTER, or an adapter alone where only one model has it. It keeps the version that the
name stands for when it is taken, to its last token. While a new version is being loaded on one worker after the other,
the name stands for the version that a pair can serve and that most workers give the name to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pdserve.errors import InvalidRequest, NotFound, Unavailable, shown
from router.gate import Match, Member, Verdict, narrowed
from router.pool import Pool

UNKNOWN_ADAPTER = "UNKNOWN_ADAPTER"


@dataclass(frozen=True)
class Named:
    """What `model` and `adapter` of a request say."""

    model: str  # empty: not said
    adapter: str = ""  # empty: the base model


def named(pool: Pool, name: str, adapter: str) -> Named:
    """Takes the names apart; `model` is returned as it came where nothing here has that name.

    Raises InvalidRequest: AMBIGUOUS_ADAPTER for an adapter of several models, TWO_ADAPTERS for two different ones.
    """
    found = _parsed(pool, name)
    if adapter and found.adapter and adapter != found.adapter:
        raise InvalidRequest(
            f"{shown(adapter)} is not the adapter that model {shown(name)} names",
            reason="TWO_ADAPTERS",
            field="adapter",
            remedy="name the adapter once",
        )
    return Named(found.model, adapter or found.adapter)


def served_names(pool: Pool) -> dict[str, tuple[str, int]]:
    """What may be given as `model` -> the base model ("" for one itself), and when that was first seen."""
    names = {}
    for model, created in pool.models().items():
        names[model] = ("", created)
        names |= {f"{model}:{adapter}": (model, created) for adapter in adapters_of(pool, model)}
    return names


def split_name(name: str, base: str) -> tuple[str, str]:
    """Model and adapter of one of `served_names`; base: what it says of the name."""
    return (base, name.removeprefix(f"{base}:")) if base else (name, "")


def listed_name(pool: Pool, name: str) -> str:
    """The name by which `served_names` has it; as it came for what is not served."""
    found = _parsed(pool, name)
    return f"{found.model}:{found.adapter}" if found.adapter else name


def adapters_of(pool: Pool, model: str) -> tuple[str, ...]:
    """Names that some ready worker of the model serves, ordered."""
    return tuple(sorted({a.name for m in pool.ready(model) for a in m.record.adapters if a.name}))


def version_of(ready: Sequence[Member], matches: Iterable[Match], model: str, adapter: str) -> bytes:
    """The digest that an adapter's name stands for now.

    Raises NotFound (UNKNOWN_ADAPTER) where no worker has the name, Unavailable (NO_ADAPTER_PAIR) where no pair can
    serve any version of it.
    """
    votes = Counter(a.digest for member in ready for a in member.record.adapters if a.name == adapter)
    if not votes:
        listed = ", ".join(sorted({a.name for m in ready for a in m.record.adapters if a.name})) or "none"
        raise NotFound(
            f"model {shown(model)} has no adapter {shown(adapter)}",
            reason=UNKNOWN_ADAPTER,
            field="adapter",
            remedy=f"load it, or use one of: {listed}",
        )
    matches, versions = tuple(matches), sorted(votes, key=lambda digest: (-votes[digest], digest))
    for digest in versions:
        if not matches or with_adapter(matches, digest):  # without a pair there is more amiss than the adapter
            return digest
    raise Unavailable(
        f"no pair of workers of model {shown(model)} has one version of adapter {shown(adapter)}",
        reason="NO_ADAPTER_PAIR",
        field="adapter",
        remedy="load it on every worker of the model",
    )


def with_adapter(matches: Iterable[Match], digest: bytes | None) -> tuple[Match, ...]:
    """The members that can compute with this version; None: everyone can with the base model."""
    return tuple(matches) if digest is None else narrowed(matches, lambda member: has(member, digest))


def has(member: Member, digest: bytes) -> bool:
    return any(adapter.digest == digest for adapter in member.record.adapters)


def only_with(verdict: Verdict, adapter: str, digest: bytes) -> Verdict:
    """A verdict on the workers that have this version. Raises NotFound where there are pairs, but none with it."""
    matches = with_adapter(verdict.matches, digest)
    if verdict.matches and not matches:
        raise adapter_gone(adapter, digest)
    return replace(verdict, matches=matches)


def adapter_gone(adapter: str, digest: bytes | None) -> NotFound:
    """For a request whose version no pair has any more: it is never answered by another one, nor by the base model."""
    return NotFound(
        f"version {(digest or b'').hex()[:16]} of adapter {shown(adapter)} has left the workers",
        reason=UNKNOWN_ADAPTER,
        field="adapter",
        remedy="send the request again: it then gets the version that is served now, if any",
    )


def _parsed(pool: Pool, name: str) -> Named:
    served: Mapping[str, int] = pool.models()
    if not name or name in served:
        return Named(name)
    model, _, adapter = name.rpartition(":")
    if model in served and adapter:
        return Named(model, adapter)
    owners = [model for model in served if name in adapters_of(pool, model)]
    if len(owners) > 1:
        raise InvalidRequest(
            f"several models have an adapter {shown(name)}",
            reason="AMBIGUOUS_ADAPTER",
            field="model",
            remedy=f"name one of: {', '.join(f'{owner}:{name}' for owner in owners)}",
        )
    return Named(owners[0], name) if owners else Named(name)
