"""What names a cache: an encoding without collisions, and digests that no process and no order can change."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_transfer.contract import (
    AttentionScheme,
    CachePlane,
    HandoffIdentity,
    PositionScheme,
    WorkerContract,
    cache_identity,
)
from cache_transfer.encoding import encode, sha256
from pdserve.engine.blocks import BlockManager
from pdserve.engine.prefix import Prefix
from router.prefixes import chain
from tests.cache_transfer.support import make_contract

BASE = make_contract(layers=2)

# -- the encoding ------------------------------------------------------------------------------


def decode(data: bytes) -> tuple[object, bytes]:
    """The first value of `data` and what follows it: a reader made from the table of the protocol page alone.

    Whatever can be read back in one way only cannot stand for two values.
    """
    tag, size = data[:1], struct.unpack("<Q", data[1:9])[0]
    body, rest = data[9 : 9 + size], data[9 + size :]
    assert len(body) == size
    if tag == b"N":
        return None, rest
    if tag == b"B":
        return body == b"\x01", rest
    if tag == b"I":
        return int(body), rest
    if tag == b"F":
        return struct.unpack("<d", body)[0], rest
    if tag == b"S":
        return body.decode(), rest
    if tag == b"Y":
        return body, rest
    items = []
    while body:
        item, body = decode(body)
        items.append(item)
    if tag == b"T":
        return tuple(items), rest
    assert tag == b"M"
    return dict(zip(items[::2], items[1::2], strict=True)), rest


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner).map(tuple) | st.dictionaries(st.text("abc"), inner), max_leaves=12
)


@given(values)
def test_what_is_written_can_be_read_back_in_one_way(value: object) -> None:
    read, rest = decode(encode(value))
    assert rest == b""
    assert repr(read) == repr(_sorted(value))  # repr tells 0 from False and -0.0


def _sorted(value: object) -> object:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return tuple(map(_sorted, value)) if isinstance(value, tuple) else value


@given(st.lists(values, max_size=4), st.lists(values, max_size=4))
def test_neighbours_do_not_flow_into_each_other(left: list[object], right: list[object]) -> None:
    """As items of one sequence, and as sequences side by side."""
    same = repr(_sorted(tuple(left))) == repr(_sorted(tuple(right)))
    assert (encode(left) == encode(right)) == same
    joined = encode((tuple(left), tuple(right)))
    assert (joined == encode(((*left, *right), ()))) == (not right)
    assert joined != encode((*left, *right))


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.integers(min_value=0))
def test_moving_a_border_between_two_fields_changes_both(text: str, at: int) -> None:
    at %= len(text) + 1
    whole = encode((text, ""))
    assert (encode((text[:at], text[at:])) == whole) == (at == len(text))


@given(values)
def test_absent_empty_and_wrapped_are_different(value: object) -> None:
    empties: list[object] = [None, "", b"", (), {}, 0, False, 0.0]
    wrapped: list[object] = [value, (value,), ((value,),), (value, None), (None, value), {"": value}]
    found = {encode(each) for each in (*empties, *wrapped)}
    distinct = {repr(_sorted(each)) for each in (*empties, *wrapped)}
    assert len(found) == len(distinct)


@dataclass(frozen=True)
class Left:
    first: object
    second: object


@dataclass(frozen=True)
class Right:
    first: object
    second: object


@given(values, values)
def test_records_are_told_apart_by_their_type_and_by_their_fields(first: object, second: object) -> None:
    assert encode(Left(first, second)) != encode(Right(first, second))
    assert encode(Left(first, second)) != encode((first, second))
    assert encode(Left(first, second)) != encode({"first": first, "second": second})
    same = repr(_sorted((first, second))) == repr(_sorted((second, first)))
    assert (encode(Left(first, second)) == encode(Left(second, first))) == same


identities = st.builds(
    HandoffIdentity,
    contract_digest=st.binary(max_size=3),
    adapter_digest=st.none() | st.binary(max_size=3),
    tenant=st.text("ab", max_size=3),
    prompt_digest=st.binary(max_size=3),
    start=st.integers(0, 3),
    end=st.integers(0, 3),
)


@given(identities, identities)
def test_two_identities_share_a_digest_only_if_they_are_equal(left: HandoffIdentity, right: HandoffIdentity) -> None:
    assert (left.digest() == right.digest()) == (left == right)


tenants = st.text("ab", max_size=2)
adapters = st.none() | st.binary(max_size=2)


@given(adapters, tenants, adapters, tenants)
def test_a_cache_is_known_by_adapter_and_tenant(a: bytes | None, t: str, b: bytes | None, u: str) -> None:
    same = (a, t) == (b, u)
    assert (cache_identity(BASE, a, t) == cache_identity(BASE, b, u)) == same
    ids = tuple(range(32))
    assert (chain(ids, BASE.digest(), a, t) == chain(ids, BASE.digest(), b, u)) == same


# -- the conditions under which a prefix may be used again ------------------------------------------

POSITIONS, ATTENTION = BASE.positions, BASE.attention
OTHERS: dict[str, bytes] = {
    "weights": cache_identity(replace(BASE, model_digest=b"n" * 32), None, "t"),
    "adapter": cache_identity(BASE, b"a" * 32, "t"),
    "an empty adapter": cache_identity(BASE, b"", "t"),
    "layers": cache_identity(replace(BASE, planes=BASE.planes[:1]), None, "t"),
    "position numbering": cache_identity(replace(BASE, positions=replace(POSITIONS, kind="alibi")), None, "t"),
    "position parameters": cache_identity(replace(BASE, positions=replace(POSITIONS, theta=1.0)), None, "t"),
    "keys not rotated": cache_identity(
        replace(BASE, positions=replace(POSITIONS, keys_cached_rotated=False)), None, "t"
    ),
    "mask": cache_identity(replace(BASE, attention=replace(ATTENTION, sliding_window=(4, 4))), None, "t"),
    "precision": cache_identity(replace(BASE, kv_dtype="bf16"), None, "t"),
    "precision of who computed it": cache_identity(BASE, None, "t", replace(BASE, weight_dtype="bf16")),
    "kernels of who computed it": cache_identity(BASE, None, "t", replace(BASE, info={"deterministic": "true"})),
    "tokenizer": cache_identity(replace(BASE, tokenizer_digest=b"k" * 32), None, "t"),
    "tenant": cache_identity(BASE, None, "u"),
    "no tenant": cache_identity(BASE, None, ""),
}


def published(ids: tuple[int, ...]) -> BlockManager:
    """Two pages of four tokens that anyone with the right identity may use."""
    books = BlockManager(8, 4)
    books.publish(Prefix(cache_identity(BASE, None, "t"), ids, 4), books.allocate("first", 2))
    books.release("first")
    return books


@pytest.mark.parametrize("collide", [False, True], ids=["true digests", "all digests equal"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_prefix_of_another_identity_is_never_found(name: str, collide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the digest finds is compared: weights, adapter, positions, mask, precision and tenant."""
    if collide:
        monkeypatch.setattr("pdserve.engine.prefix._root", lambda identity: bytes(32))
        monkeypatch.setattr("pdserve.engine.prefix._chain", lambda parent, content: bytes(32))
    ids = tuple(range(8))
    books = published(ids)
    assert books.match(Prefix(OTHERS[name], ids, 4), 8) == ((), 0)
    pages, tokens = books.match(Prefix(cache_identity(BASE, None, "t"), ids, 4), 8)
    assert tokens == 4 * len(pages) == (4 if collide else 8)
    if not collide:  # a boundary that cuts a page finds the pages before it
        assert books.match(Prefix(cache_identity(BASE, None, "t"), ids, 4), 7)[1] == 4
        assert books.match(Prefix(cache_identity(BASE, None, "t"), (*ids[:7], 99), 4), 8)[1] == 4
    books.check_integrity()


# -- the same in every process -------------------------------------------------------------------

DIGESTS = """
import json
from dataclasses import replace
from cache_transfer.contract import HandoffIdentity, PositionScheme, cache_identity, prompt_digest
from pdserve.engine.prefix import Prefix
from pdserve.tokenizer import Bundle
from router.gate import group_key
from router.prefixes import chain
from router.tenants import digest_of
from tests.cache_transfer.test_identity import plain_contract

names = {"factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"}
info = {name: name.upper() for name in names}
scheme = PositionScheme("rope", 1e4, 8, "llama3", tuple((name, len(name)) for name in names))
contract = replace(plain_contract(), positions=scheme, info=info)
ids = tuple(range(64))
bundle = Bundle(
    tokenizer_json=json.dumps({"model": {"vocab": {name: n for n, name in enumerate(sorted(names))}}}),
    chat_template="{{ messages }}",
    special_tokens={name: f"<{name}>" for name in names},
    vocab_size=6,
)
print(json.dumps({
    "order of a set": list(names),
    "contract": contract.digest().hex(),
    "group": group_key(contract, contract.digest()).hex(),
    "identity": HandoffIdentity(contract.digest(), None, "t", prompt_digest(ids), 0, 64).digest().hex(),
    "cache identity": cache_identity(contract, b"a" * 32, "t").hex(),
    "pages": [link.key.hex() for link in Prefix(cache_identity(contract, None, "t"), ids, 16).links(4)],
    "router's blocks": [link.hex() for link in chain(ids, contract.digest(), None, "t")],
    "tokenizer": bundle.digest().hex(),
    "key": digest_of("sk-0123456789abcdef").hex(),
}))
"""


def plain_contract() -> WorkerContract:
    return BASE


def digests(seed: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS],
        env={"PYTHONHASHSEED": seed},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_hash_seeds_change_no_digest() -> None:
    """Python's own hashes differ between processes, and with them the order of a set."""
    first, second = (digests(seed) for seed in ("1", "2"))
    assert first.pop("order of a set") != second.pop("order of a set")
    assert first == second and len(first) == 8


def test_every_class_that_is_digested_is_made_of_plain_values() -> None:
    """A field of another kind would need a rule of the encoding first."""
    for cls, value in (
        (PositionScheme, POSITIONS),
        (AttentionScheme, ATTENTION),
        (CachePlane, BASE.planes[0][0]),
        (HandoffIdentity, HandoffIdentity(b"", None, "", b"", 0, 0)),
    ):
        for field in fields(cls):
            encode(getattr(value, field.name))
    with pytest.raises(TypeError):
        sha256("domain", {1, 2})
