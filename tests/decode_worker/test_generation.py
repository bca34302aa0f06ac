"""Stop rules and text, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from decode_worker.generation import Generation, check_endings
from decode_worker.sampling import Choice
from pdserve.errors import InvalidRequest
from pdserve.request import SamplingParams
from pdserve.rpc.events import LENGTH, STOP, TokenBatch, Usage
from pdserve.tokenizer import Tokenizer
from tests.decode_worker.small_bundle import E_FIRST, ids_of, small_bundle

END = ids_of("~")[0]


def generation(limit: int = 100, **options: Any) -> Generation:
    tokenizer = Tokenizer(small_bundle(eos_ids=(END,)))
    return Generation(ids_of("abc"), SamplingParams(**options), limit, (END,), tokenizer)


def feed(made: Generation, ids: Sequence[int]) -> list[TokenBatch]:
    batches = made.replay(ids)
    assert [b.first_index for b in batches] == list(range(len(batches)))
    return batches


def text(batches: Sequence[TokenBatch]) -> str:
    return b"".join(b.text for b in batches).decode()


def test_text_comes_in_whole_characters() -> None:
    batches = feed(generation(), ids_of("aé b"))
    assert [b.text.decode() for b in batches] == ["a", "", "é", " ", "b"]


def test_length_releases_what_was_held() -> None:
    made = generation(limit=2, stop=("bc",))
    batches = feed(made, ids_of("ab"))
    assert [b.text for b in batches] == [b"a", b"b"]
    assert made.finish is not None and (made.finish.reason, made.finish.usage) == (LENGTH, Usage(3, 2, 0))


def test_half_a_character_at_the_end_is_given_out_as_it_is() -> None:
    batches = feed(generation(limit=1), (E_FIRST,))
    assert batches[0].text == b"\xc3"


@pytest.mark.parametrize(
    ("stops", "released", "matched"),
    [(("llo w",), "he", "llo w"), (("o", "lo"), "hel", "lo"), (("zz", " "), "hello", " "), (("é",), "hello w", "é")],
)
def test_stop_strings_across_tokens(stops: tuple[str, ...], released: str, matched: str) -> None:
    made = generation(stop=stops)
    batches = feed(made, ids_of("hello wé and more"))
    assert text(batches) == released
    assert made.finish is not None
    assert (made.finish.reason, made.finish.stop_string, made.finish.stop_token_id) == (STOP, matched, None)
    assert made.finish.usage.output_tokens == len(batches) == len(made.output)


def test_an_end_id_gives_no_text_but_counts() -> None:
    made = generation(stop=("ab~",))
    batches = feed(made, ids_of("ab~cd"))
    assert text(batches) == "ab" and len(batches) == 3
    assert made.finish is not None and made.finish.stop_token_id == END


def test_an_end_id_is_text_to_nobody_even_when_ignored() -> None:
    made = generation(ignore_eos=True, limit=4)
    assert text(feed(made, ids_of("a~b"))) == "ab" and made.finish is None


def test_a_stop_id_ends_and_gives_no_text() -> None:
    made = generation(stop_token_ids=ids_of("x"), ignore_eos=True)
    assert text(feed(made, ids_of("wxyz"))) == "w"
    assert made.finish is not None and made.finish.stop_token_id == ids_of("x")[0]


def test_nothing_stops_before_min_tokens() -> None:
    made = generation(stop=("aa",), stop_token_ids=ids_of("z"), min_tokens=4)
    batches = feed(made, ids_of("aazaaaa"))
    assert text(batches) == "aaza" and made.finish is not None and made.finish.stop_string == "aa"
    assert len(batches) == 6  # the stop string is looked for in the text after four tokens


def test_stop_beats_length_on_the_last_token() -> None:
    made = generation(limit=2, stop=("ab",))
    feed(made, ids_of("ab"))
    assert made.finish is not None and made.finish.reason == STOP


def test_replay_leaves_the_same_state_as_sampling() -> None:
    ids = ids_of("one two twé")
    for cut in range(len(ids)):
        resumed, whole = (generation(stop=("o t",), frequency_penalty=1.0) for _ in range(2))
        replayed = feed(resumed, ids[:cut])
        rest = [resumed.accept(Choice(i)) for i in ids[cut:] if resumed.finish is None]
        assert [*replayed, *rest] == feed(whole, ids)
        assert resumed.finish == whole.finish and resumed.sampler._counts == whole.sampler._counts


def test_rules_that_cannot_be_followed_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_endings(SamplingParams(stop=("x",)), (), 10, has_text=False)
    assert (caught.value.field, caught.value.reason) == ("stop", "NO_TOKENIZER")
    with pytest.raises(InvalidRequest) as caught:
        check_endings(SamplingParams(min_tokens=1, stop_token_ids=(0, 1)), (2,), 3, has_text=True)
    assert caught.value.field == "min_tokens"
    check_endings(SamplingParams(min_tokens=1, stop_token_ids=(0, 1), ignore_eos=True), (2,), 3, has_text=True)
