"""Output kept to a grammar. What matches is judged by `re` and `jsonschema`, not by what makes the masks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from decode_worker.generation import Generation
from decode_worker.grammar import Grammars
from decode_worker.sampling import sample
from pdserve.errors import Internal, InvalidRequest, PdserveError
from pdserve.request import JSON_SCHEMA, LARK, MAX_GRAMMAR_BYTES, REGEX, Grammar, SamplingParams
from pdserve.rpc.events import LENGTH, STOP
from pdserve.tokenizer import Tokenizer
from tests.decode_worker.rig import rig
from tests.decode_worker.small_bundle import ids_of, small_bundle
from tests.decode_worker.test_preemption import check, preempting, undisturbed
from tests.engine.tiny import prompt, tiny_engine

END = ids_of("~")[0]
VOCAB = 100  # three ids more than the tokenizer has, as padded models do
BUNDLE = small_bundle(eos_ids=(END,))
TOKENIZER = Tokenizer(BUNDLE)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value: Any) -> Grammar:
    return Grammar(JSON_SCHEMA, json.dumps(value))


def run(params: SamplingParams, seed: int = 0, grammars: Grammars | None = None, limit: int = 200) -> Generation:
    """One output of a model that knows nothing: random logits at every step."""
    kept = Grammars(TOKENIZER, VOCAB) if grammars is None else grammars
    made = Generation(ids_of("abc"), params, limit, (END,), TOKENIZER, kept)
    rng = np.random.default_rng(seed)
    texts = []
    while made.finish is None:
        (choice,) = sample([(made.sampler, torch.from_numpy(rng.normal(size=VOCAB)))])
        if isinstance(choice, PdserveError):
            raise choice
        texts.append(made.accept(choice).text)
    made.text = b"".join(texts)  # type: ignore[attr-defined]
    return made


def text_of(made: Generation) -> str:
    return bytes(made.text).decode()  # type: ignore[attr-defined]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("expression", [r"[a-c]{3}(-[0-9]{1,4}){2}", "(yes|no|maybe)", r"x+y?z*", "é{1,3}!"])
def test_whatever_the_model_says_the_output_matches_the_expression(expression: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, grammar=Grammar(REGEX, expression))
    for seed in range(5):
        made = run(params, seed)
        assert made.finish is not None
        if made.finish.reason == STOP:
            assert re.fullmatch(expression, text_of(made))


def test_json_is_valid_by_an_independent_validator() -> None:
    grammars = Grammars(TOKENIZER, VOCAB)
    seen = set()
    for seed in range(12):
        made = run(SamplingParams(seed=seed, grammar=schema(PERSON)), seed, grammars, limit=2000)
        assert made.finish is not None and made.finish.reason == STOP
        value = json.loads(text_of(made))
        jsonschema.validate(value, PERSON)
        seen.add(tuple(value))
    assert len(seen) > 1  # it is the model's choice what is left out
    assert len(grammars) == 1


def test_a_lark_grammar() -> None:
    made = run(SamplingParams(seed=1, grammar=Grammar(LARK, 'start: "f(" arg ("," arg)* ")"\narg: /[a-z]/')))
    assert re.fullmatch(r"f\([a-z](,[a-z])*\)", text_of(made))


def test_a_complete_output_ends_without_a_token_more_and_without_any_end_token() -> None:
    params = SamplingParams(seed=1, ignore_eos=True, min_tokens=50, grammar=Grammar(REGEX, "abc"))
    made = run(params)
    assert made.finish is not None
    assert (text_of(made), made.finish.reason, made.finish.stop_token_id) == ("abc", STOP, None)
    assert made.finish.usage.output_tokens == 3
    # At the limit, too, it is whole and not cut.
    exactly = run(params, limit=3)
    assert exactly.finish is not None and exactly.finish.reason == STOP


def test_end_tokens_come_only_where_the_grammar_may_end() -> None:
    ends = 0
    for seed in range(20):
        made = run(SamplingParams(temperature=3.0, seed=seed, grammar=Grammar(REGEX, "ab(cd)*")), seed)
        assert made.finish is not None and made.finish.reason == STOP
        assert re.fullmatch("ab(cd)*", text_of(made))
        ends += made.finish.stop_token_id == END
    assert ends == 20
    cut = run(SamplingParams(seed=0, grammar=Grammar(REGEX, "ab(cd)*"), ignore_eos=True), limit=31)
    assert cut.finish is not None and cut.finish.reason == LENGTH
    assert text_of(cut) == ("ab" + "cd" * 20)[:31]


def test_stop_ids_and_stop_strings_go_with_a_grammar() -> None:
    (stop_id,) = ids_of("$")
    for seed in range(5):
        made = run(SamplingParams(seed=seed, grammar=Grammar(REGEX, "ab(cd)*"), stop_token_ids=(stop_id,)), seed)
        assert re.fullmatch("ab(cd)*", text_of(made))
    made = run(SamplingParams(seed=0, grammar=Grammar(REGEX, "abcdef"), stop=("de",)))
    assert text_of(made) == "abc"


def test_bias_and_penalties_choose_among_what_is_allowed() -> None:
    """The grammar comes first: no bias brings back what it forbids, and they decide among the rest."""
    z, q = ids_of("z")[0], ids_of("q")[0]
    params = SamplingParams(temperature=0, seed=0, grammar=Grammar(REGEX, "[pq]{4}"), logit_bias={z: 100.0, q: 100.0})
    assert text_of(run(params)) == "qqqq"
    banned = replace(params, logit_bias={q: -100.0, ids_of("p")[0]: -100.0})
    assert re.fullmatch("[pq]{4}", text_of(run(banned)))


def test_an_output_replayed_elsewhere_goes_on_at_the_same_place() -> None:
    params = SamplingParams(temperature=2.0, seed=9, grammar=schema(PERSON))
    whole = run(params, seed=4, limit=2000)
    for cut in (1, 7, len(whole.output) - 1):
        other = Generation(ids_of("abc"), params, 2000, (END,), TOKENIZER, Grammars(TOKENIZER, VOCAB))
        other.replay(whole.output[:cut])
        assert other.sampler.constraint is not None and other.sampler.constraint.allowed()[whole.output[cut]]
        first = Generation(ids_of("abc"), params, 2000, (END,), TOKENIZER, Grammars(TOKENIZER, VOCAB))
        for token in whole.output[:cut]:
            first.replay([token])
        assert first.sampler.constraint is not None
        assert (first.sampler.constraint.allowed() == other.sampler.constraint.allowed()).all()


def test_a_replay_that_does_not_match_fails_its_row_and_no_other() -> None:
    params = SamplingParams(temperature=0, seed=0, grammar=Grammar(REGEX, "abc"))
    bad = Generation(ids_of("a"), params, 9, (END,), TOKENIZER, Grammars(TOKENIZER, VOCAB))
    bad.replay(ids_of("x"))
    good = Generation(ids_of("a"), params, 9, (END,), TOKENIZER, Grammars(TOKENIZER, VOCAB))
    failed, chosen = sample([(made.sampler, torch.zeros(VOCAB)) for made in (bad, good)])
    assert isinstance(failed, Internal) and failed.reason == "GRAMMAR_FAILED"
    assert not isinstance(chosen, PdserveError) and chosen.token == ids_of("a")[0]


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(REGEX, "[a-"),
        Grammar(REGEX, "(?=a)b"),
        Grammar(LARK, 'start: "a" nothing'),
        Grammar(JSON_SCHEMA, '{"type": "strange"}'),
        Grammar(JSON_SCHEMA, '{"$ref": "http://example.org/other"}'),
        Grammar(JSON_SCHEMA, '{"type": "object", "dependentSchemas": {"a": {}}}'),
    ],
    ids=lambda grammar: grammar.text,
)
def test_a_grammar_that_cannot_be_followed_is_refused_by_name(grammar: Grammar) -> None:
    grammar.check()
    with pytest.raises(InvalidRequest) as caught:
        Grammars(TOKENIZER, VOCAB).start(grammar)
    assert (caught.value.reason, caught.value.field) == ("INVALID_GRAMMAR", grammar.kind)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (REGEX, ""),
        (REGEX, "a" * (MAX_GRAMMAR_BYTES + 1)),
        (REGEX, "\udc00"),
        (JSON_SCHEMA, "{nope"),
        (JSON_SCHEMA, "[1]"),
        (JSON_SCHEMA, "[" * 20_000),
        ("ebnf", "a"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_no_grammar_is_refused_before_any_work(kind: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(grammar=Grammar(kind, text)).check()
    assert caught.value.field == (kind if kind != "ebnf" else "grammar")


def test_a_model_without_text_follows_no_grammar() -> None:
    with pytest.raises(InvalidRequest) as caught:
        Grammars(None, VOCAB).start(Grammar(REGEX, "a"))
    assert caught.value.reason == "NO_TOKENIZER"


def test_compiled_grammars_are_kept_within_a_bound() -> None:
    grammars = Grammars(TOKENIZER, VOCAB, limit=3)
    for n in (1, 2, 3, 1, 4):
        grammars.start(Grammar(REGEX, f"a{{{n}}}"))
    assert len(grammars) == 3 and grammars.has(Grammar(REGEX, "a{1}")) and not grammars.has(Grammar(REGEX, "a{2}"))


def test_each_output_has_a_state_of_its_own() -> None:
    grammars = Grammars(TOKENIZER, VOCAB)
    first, second = (grammars.start(Grammar(REGEX, "ab")) for _ in range(2))
    first.advance(ids_of("a")[0])
    assert np.flatnonzero(first.allowed()).tolist() == list(ids_of("b"))
    assert np.flatnonzero(second.allowed()).tolist() == list(ids_of("a"))


@pytest.mark.parametrize("at", [(0,), (5,), (3, 4)], ids=str)
async def test_a_preempted_output_keeps_its_place_in_the_grammar(at: tuple[int, ...]) -> None:
    params = SamplingParams(temperature=1.5, seed=11, max_tokens=40, grammar=Grammar(REGEX, "([a-f]{2}[0-9]){5}"))
    [wanted] = undisturbed([prompt(9)], params, bundle=BUNDLE)
    assert re.fullmatch(b"([a-f]{2}[0-9]){5}", wanted.text) and wanted.finish.reason == STOP
    async with rig(decode=tiny_engine(deterministic=True), bundle=BUNDLE, recompute_tokens=4) as r:
        with preempting(r, at):
            check(await r.generate(prompt(9), params), wanted)
        await r.empty()


async def test_a_bad_grammar_is_refused_by_the_worker_before_a_ticket() -> None:
    async with rig(bundle=BUNDLE) as r:
        params = SamplingParams(seed=1, grammar=Grammar(REGEX, "[a-"))
        async with r.call(prompt(5), params) as call:
            with pytest.raises(InvalidRequest, match="regex"):
                await call.admitted()
        await r.empty()
