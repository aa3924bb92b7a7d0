"""Forms compiled over a small vocabulary: what they let through, what is refused, and what compiling may cost."""

import json
import random
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from free_interpreter import share_beside

from chairlift._core import GrammarVocabulary
from chairlift.errors import InvalidRequest, QueueFull, RequestFailed
from chairlift.grammar import grammars as module
from chairlift.grammar import trial, usage
from chairlift.grammar.allowance import Allowance
from chairlift.grammar.grammar import check
from chairlift.grammar.grammars import Grammars
from chairlift.grammar.source import Tag, ToolCallFormat, calls_grammar, tags_grammar
from chairlift.grammar.trial import Vocabulary
from chairlift.grammar.usage import GrammarUsage
from chairlift.sampling import MAX_GRAMMAR, StructuredOutput
from chairlift.tokenizer import Tokenizer

PATIENCE = 60.0
"""Seconds to wait for a compiled grammar; a guard."""
WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 8}},
}


@pytest.fixture(scope="module")
def tokenizer(byte_model):
    return Tokenizer(byte_model)


@pytest.fixture(scope="module")
def vocabulary(byte_model, tokenizer):
    [eos] = tokenizer.eos_token_ids
    return Vocabulary(byte_model / "tokenizer.json", 300, (eos,))


@pytest.fixture(scope="module")
def grammars(vocabulary):
    made = Grammars(vocabulary)
    yield made
    made.close()


@pytest.fixture(scope="module")
def wordy(byte_model, tmp_path_factory):
    """Grammars over a vocabulary with long tokens, along which the parser has to try ambiguous grammars."""
    made, source = tokenizers.Tokenizer.from_file(str(byte_model / "tokenizer.json")), random.Random(0)
    letters = ("abcdefghijklmnopqrstuvwxyz ", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    made.add_tokens(sorted({"".join(source.choices(letters[i % 2], k=source.randint(3, 10))) for i in range(4000)}))
    file = tmp_path_factory.mktemp("wordy") / "tokenizer.json"
    made.save(str(file))
    wordy = Grammars(Vocabulary(file, made.get_vocab_size(), (made.token_to_id("</s>"),)))
    yield wordy
    wordy.close()


def structure(kind, text=""):
    return StructuredOutput(kind, text if isinstance(text, str) else json.dumps(text))


def allowed(matcher):
    """The tokens that may come next."""
    bitmask = np.zeros((2, -(-300 // 32)), dtype=np.int32)
    matcher.mask(bitmask, 1)
    assert not bitmask[0].any()
    return {token for token in range(300) if int(bitmask[1, token // 32]) >> (token % 32) & 1}


def takes(grammars, tokenizer, form, text):
    """Whether the form has `text` as a whole answer."""
    matcher = grammars.compile(form).result(PATIENCE).matcher()
    for token in tokenizer.encode(text):
        if token not in allowed(matcher):
            return False
        matcher.accept(token)
    return bool(tokenizer.eos_token_ids & allowed(matcher))


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (
            structure("json", WEATHER),
            ['{"city":"Bern"}', '{"city":""}'],
            ["{}", '{"city": "Bern"}', '{"city":1}', '{"city":"longer than eight"}'],
        ),
        (structure("json_object"), ["{}", '{"a":[1,null,"é"]}'], ["[]", "1", ""]),
        (structure("regex", r"[0-9]{3}-\w+"), ["123-ab", "000-é"], ["12-ab", "123-", "x"]),
        (structure("choice", ["yes", 'no "never"', "a\\b\n", "é🎿"]), ["yes", 'no "never"', "a\\b\n", "é🎿"], ["no", "", "y"]),
        (structure("grammar", 'start: "a" start "b" | "c"'), ["c", "acb", "aaacbbb"], ["ab", "acbb", "aacb"]),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutput) else "",
)
def test_a_form_lets_through_what_it_describes_and_nothing_else(grammars, tokenizer, form, good, bad):
    assert [text for text in good if not takes(grammars, tokenizer, form, text)] == []
    assert [text for text in bad if takes(grammars, tokenizer, form, text)] == []


def test_behind_its_end_only_ends_of_sequence_may_come(grammars, tokenizer):
    matcher = grammars.compile(structure("choice", ["a"])).result(PATIENCE).matcher()
    matcher.accept(*tokenizer.encode("a"))
    assert allowed(matcher) == tokenizer.eos_token_ids
    matcher.accept(*tokenizer.eos_token_ids)


def test_forced_tokens_are_the_only_ones_that_may_come(grammars, tokenizer):
    matcher = grammars.compile(structure("regex", r'\{"name": "[a-c]{2}", "kind": "(cat|cow)"\}')).result(PATIENCE).matcher()
    runs = []
    for token in tokenizer.encode('{"name": "ab", "kind": "cow"}'):
        copy = matcher.copy()
        runs.append(len(matcher.forced()))
        for forced in matcher.forced():
            assert allowed(copy) == {forced}
            copy.accept(forced)
        matcher.accept(token)
    assert runs[0] > 5
    assert 0 in runs, "letters of three"
    assert matcher.forced() == []


def test_a_token_out_of_place_is_an_error_of_that_matcher_alone(grammars, tokenizer):
    grammar = grammars.compile(structure("choice", ["a"])).result(PATIENCE)
    wrong, right = grammar.matcher(), grammar.matcher()
    with pytest.raises(ValueError, match="doesn't satisfy"):
        wrong.accept(*tokenizer.encode("b"))
    with pytest.raises(ValueError, match="doesn't satisfy"):
        allowed(wrong)
    assert allowed(right) == set(tokenizer.encode("a"))


def test_space_between_json_tokens_is_bounded(grammars, tokenizer):
    matcher = grammars.compile(StructuredOutput("json_object", disable_any_whitespace=False)).result(PATIENCE).matcher()
    [space] = tokenizer.encode(" ")
    for token in [*tokenizer.encode("{"), *[space] * 64]:
        matcher.accept(token)
    assert space not in allowed(matcher)


COMPACT = {"x-guidance": {"whitespace_flexible": False}}
SPACED = {"x-guidance": {"whitespace_pattern": "[ ]"}}


@pytest.mark.parametrize(
    "form",
    [
        structure("json", {}),
        structure("json_object"),
        StructuredOutput("json", "{}", disable_any_whitespace=True),
        StructuredOutput("json", json.dumps(SPACED), disable_any_whitespace=True),
        StructuredOutput("json", "{}", before='start: "" @answer', disable_any_whitespace=True),
        StructuredOutput("json_object", disable_any_whitespace=True),
        structure("json", COMPACT),
        calls_grammar(ToolCallFormat(before="", between="", after=""), {"": COMPACT}, {}, several=False),
        calls_grammar(ToolCallFormat(begin="<c>"), {"f": None}, {}, several=False, instead=StructuredOutput("json_object")),
        calls_grammar(ToolCallFormat(before="", between="", after=""), {"": None}, {}, several=False),
    ],
    ids=[
        "by default",
        "any object",
        "json",
        "instead of its own",
        "behind a beginning",
        "json_object",
        "its own",
        "a tool's own",
        "beside calls",
        "a tool",
    ],
)
def test_a_compact_answer_has_no_whitespace_between_json_tokens(grammars, tokenizer, form):
    assert takes(grammars, tokenizer, form, '{"a":1,"b":[1,2]}')
    for spaced in ('{"a": 1}', '{"a" :1}', '{ "a":1}', '{"a":1 }', '{"a":1, "b":2}', '{"a":[1, 2]}', '{"a":\n1}'):
        assert not takes(grammars, tokenizer, form, spaced)


def test_a_schema_says_which_whitespace_may_come(grammars, tokenizer):
    tags = tags_grammar([Tag("<f>", COMPACT, "</f>"), Tag("<g>", SPACED, "</g>")], ["<f>", "<g>"], "response_format")
    for text, good in (("<f>[1,2]</f>", True), ("<f>[1, 2]</f>", False), ("<g>[1, 2]</g>", True), ("<g>[1,\n2]</g>", False)):
        assert takes(grammars, tokenizer, tags, text) == good
    unbounded = structure("json", {"x-guidance": {"whitespace_flexible": True}})
    assert takes(grammars, tokenizer, unbounded, f"{{{' ' * 65}}}")


OTHERWISE = {"x-guidance": {"coerce_one_of": True}}


@pytest.mark.parametrize(
    ("form", "spaces"),
    [
        (structure("json", OTHERWISE), 0),
        (structure("json", OTHERWISE)._replace(disable_any_whitespace=False), 64),
        (tags_grammar([Tag("<f>", OTHERWISE, "")], ["<f>"], "response_format"), 0),
        (calls_grammar(ToolCallFormat(begin="<f>", before="", between="", after=""), {"": OTHERWISE}, {}, several=False), 0),
    ],
    ids=["json", "json with whitespace", "a tag", "a tool"],
)
def test_space_is_bounded_whatever_else_a_schema_says(grammars, tokenizer, form, spaces):
    begin = "" if form.kind == "json" else "<f>"
    assert takes(grammars, tokenizer, form, f"{begin}{{{' ' * spaces}}}")
    assert not takes(grammars, tokenizer, form, f"{begin}{{{' ' * (spaces + 1)}}}")


CHAIN = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1200)} | {"d1200": {}}


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (structure("json", {"type": 123}), "type must be a string"),
        (structure("json", {"properties": {"a": {"type": "hiccup"}}}), "hiccup"),
        (structure("json", {"$ref": "http://169.254.169.254/s.json"}), "does not fetch"),
        (structure("json", {"$ref": "#"}), "no answer can have this form"),
        (structure("json", {"type": "array", "uniqueItems": True}), "uniqueItems"),
        (structure("json", {"x-guidance": []}), "x-guidance"),
        (structure("json", {"x-guidance": {"whitespace_flexible": "no"}}), "expected a boolean"),
        (structure("json", {"enum": []}), ""),
        (structure("json", "["), ""),
        (structure("json", "\ud800"), "Expecting value"),
        (structure("json", {"$defs": CHAIN, "$ref": "#/$defs/d0"}), "too deeply"),
        (structure("regex", "("), "unclosed group"),
        (structure("regex", "(?=a)b"), "look-around"),
        (structure("regex", r"(a)\1"), "backreferences"),
        (structure("regex", "(" * 8000), ""),
        (structure("choice", []), "not empty"),
        (structure("grammar", ""), "Empty grammar"),
        (structure("grammar", "start: foo"), "foo"),
        (structure("grammar", "start: " + "(" * 9000), "deeply nested"),
        (structure("grammar", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(6000)) + 'r6000: "a"'), "too deeply"),
    ],
    ids=lambda value: value.text[:30].encode("ascii", "replace").decode() if isinstance(value, StructuredOutput) else "",
)
def test_what_cannot_be_used_is_refused_with_a_reason(grammars, form, says):
    with pytest.raises(InvalidRequest) as refused:
        grammars.compile(form).result(PATIENCE)
    assert says in str(refused.value)
    assert 0 < len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_what_takes_too_long_is_refused_and_the_next_one_served(grammars):
    slow = grammars.compile(structure("json", {"type": "integer", "multipleOf": 10_000_019}))
    behind = grammars.compile(structure("choice", ["behind"]))
    with pytest.raises(InvalidRequest, match="longer to compile than the 1 s") as refused:
        slow.result(PATIENCE)
    assert refused.value.code == "grammar_timeout"
    assert behind.result(PATIENCE).matcher()


@pytest.mark.parametrize(
    "form",
    [
        structure("regex", "(a|aa)+$"),
        structure("regex", "((a|aa)+)+(b|bb)*"),
        structure("regex", "(a|b)*a(a|b){500}"),
        structure("json", {"properties": {"a": {"type": "string", "pattern": "(a|a)*b(.{1000,2000}){50}"}}}),
        structure("json", {"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}),
        structure("json", {"enum": [f"e{i}" for i in range(5000)]}),
    ],
    ids=lambda form: form.text[:30],
)
def test_what_only_looks_dangerous_is_served(grammars, form):
    assert allowed(grammars.compile(form).result(PATIENCE).matcher())


def one_of(number):
    """A schema of objects that differ in their property."""
    only = [{"type": "object", "properties": {f"a{i}": {"type": "integer"}}, "required": [f"a{i}"]} for i in range(number)]
    return {"anyOf": [one | {"additionalProperties": False} for one in only]}


def within(schema):
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}


NODE = {"type": "object", "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        pytest.param(structure("choice", [f"option {i}" for i in range(4096)]), "option 4095", id="choice of 4,096"),
        pytest.param(structure("choice", ["", "a"]), "", id="an empty choice"),
        pytest.param(structure("json", one_of(300)), '{"a299":1}', id="anyOf of 300"),
        pytest.param(structure("json", one_of(3000)), '{"a2999":1}', id="anyOf of 3,000", marks=pytest.mark.slow),
        pytest.param(structure("json", within(one_of(1500))), '{"x":{"a1499":1}}', id="anyOf of 1,500 in a property"),
        pytest.param(
            structure("json", {"type": "object", "properties": {f"p{i}": {"type": "boolean"} for i in range(1000)}}),
            '{"p0":true,"p1":false,"p999":true}',
            id="1,000 optional properties",
        ),
        pytest.param(
            structure("json", {"$defs": {"node": NODE}, "$ref": "#/$defs/node"}),
            '{"value":1,"children":[{"value":2,"children":[]}]}',
            id="recursion",
        ),
        pytest.param(structure("json", {"enum": [f"e{i}" for i in range(5000)]}), '"e4999"', id="enum of 5,000"),
        pytest.param(structure("grammar", 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/'), "1+(2*3+4)*5", id="arithmetic"),
    ],
)
def test_large_grammars_are_served(grammars, tokenizer, form, text):
    assert takes(grammars, tokenizer, form, text)
    assert not takes(grammars, tokenizer, form, "~")


@pytest.mark.parametrize(
    "form",
    [
        structure("grammar", "start: s\ns: s s | s s s | A\nA: /[a-z ]/"),
        structure("grammar", "start: s\ns: s s | s s s | A\nA: /[A-Z]/"),
        structure("grammar", "start: s\ns: s s s s s | s s | A\nA: /./"),
        structure("grammar", "start: s\ns: (s*)* | A\nA: /[a-z ]/"),
        structure("grammar", "start: s\ns: A? s? A? s?\nA: /[a-z ]/"),
        pytest.param(structure("json", within(one_of(6000))), marks=pytest.mark.slow),
    ],
    ids=["letters", "capitals", "five", "stars", "optional", "anyOf of 6,000 in a property"],
)
def test_a_grammar_whose_masks_are_expensive_is_refused_at_once(wordy, form):
    with pytest.raises(InvalidRequest) as refused:
        wordy.compile(form).result(PATIENCE)
    assert refused.value.code in ("grammar_too_complex", "grammar_timeout")
    assert len(str(refused.value)) < 500


MANY_STATES = structure("regex", r"b?(.|\n)*[a-m](.|\n){16}end")


def write(matcher, tokenizer):
    """Writes 3,000 letters."""
    source = random.Random(3)
    for _ in range(3000):
        allowed(matcher)
        matcher.accept(*tokenizer.encode(source.choice("mz")))


def test_a_lexer_without_states_fails_for_its_tenant_alone_and_is_made_anew(vocabulary, tokenizer, monkeypatch):
    monkeypatch.setattr(trial, "MAX_LEXER_STATES", 3000)
    monkeypatch.setattr(usage, "GRAMMAR_SECONDS", 1e6)
    made = Grammars(vocabulary)
    eve, alice = (made.compile(MANY_STATES, tenant) for tenant in ("eve", "alice"))
    first = alice.result(PATIENCE).matcher()
    with pytest.raises(InvalidRequest, match="too many states") as failed:
        write(eve.result(PATIENCE).matcher(), tokenizer)
    assert failed.value.code == "grammar_too_complex"
    assert allowed(first)
    assert made.compile(MANY_STATES, "alice") is alice
    again = made.compile(MANY_STATES, "eve")
    assert again is not eve
    assert allowed(again.result(PATIENCE).matcher())
    assert made.compile(MANY_STATES, "eve") is again
    made.close()


def write_words(matcher):
    """Writes 3,000 long tokens without a look at the masks, as a sequence that goes on does. Each adds states."""
    source = random.Random(0)
    for _ in range(3000):
        matcher.accept(source.randrange(300, 4000))


def test_a_lexer_that_runs_out_of_states_within_a_token_fails_for_that_reason(wordy, monkeypatch):
    monkeypatch.setattr(trial, "MAX_LEXER_STATES", 3000)
    monkeypatch.setattr(usage, "GRAMMAR_SECONDS", 1e6)
    grammar = wordy.compile(MANY_STATES, "eve").result(PATIENCE)
    with pytest.raises(InvalidRequest, match="too many states") as failed:
        write_words(grammar.matcher())
    assert failed.value.code == "grammar_too_complex"
    assert wordy.compile(MANY_STATES, "eve").result(PATIENCE) is not grammar


@pytest.mark.parametrize(("message", "broken"), [("NoExtensionBias", False), ("panic: index out of bounds", True)])
def test_a_grammar_that_cannot_go_on_is_the_clients_fault(message, broken):
    spent = GrammarUsage(Allowance(1.0))
    with pytest.raises(InvalidRequest, match=f"no way to go on .*{message}"):
        check(SimpleNamespace(error=f"{message}\n<non-verbose/>"), spent)
    assert spent.worn is broken


def test_a_matcher_without_time_computes_nothing(vocabulary, tokenizer):
    made = Grammars(vocabulary)
    grammar = made.compile(structure("choice", ["ab"])).result(PATIENCE)
    matcher = grammar.matcher()
    assert matcher.forced()
    grammar.usage.spend(2 * usage.GRAMMAR_SECONDS)
    assert matcher.forced() == []
    for compute in (lambda: allowed(matcher), lambda: matcher.accept(*tokenizer.encode("ab"))):
        with pytest.raises(InvalidRequest) as refused:
            compute()
        assert refused.value.code == "grammar_timeout"
    made.close()


def test_a_tenant_whose_grammars_took_too_much_time_waits_with_new_ones(vocabulary):
    made = Grammars(vocabulary)
    old = made.compile(structure("choice", ["a"]), "eve")
    other = made.compile(structure("choice", ["other"]), "eve").result(PATIENCE).usage
    other.spend(1.5 * usage.TENANT_SECONDS)
    with pytest.raises(QueueFull, match="more processor time") as full:
        made.compile(structure("choice", ["b"]), "eve").result(PATIENCE)
    assert full.value.retry_after > 0
    assert made.compile(structure("choice", ["a"]), "eve") is old
    assert allowed(old.result(PATIENCE).matcher()), "its usual grammars go on"
    assert made.compile(structure("choice", ["b"]), "alice").result(PATIENCE)
    other.spend(-10.0)
    assert made.compile(structure("choice", ["b"]), "eve").result(PATIENCE)
    made.close()


MIB = 2**20


@pytest.fixture
def sized(vocabulary, monkeypatch):
    """Grammars that take 100 MiB each, as far as their trial says, and the choices that were tried."""
    made, tried = Grammars(vocabulary), []

    def run(_, form):
        tried.append(*json.loads(form.text))
        return 100 * MIB

    monkeypatch.setattr(trial.Trial, "run", run)
    yield made, tried
    made.close()


def test_a_small_grammar_counts_little_and_a_large_one_what_it_takes(grammars):
    wide = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1500)}}
    small, large = (grammars.compile(form).result(PATIENCE).size for form in (structure("choice", ["small"]), structure("json", wide)))
    assert small < MIB < 5 * MIB < large < 50 * MIB


def test_bytes_are_counted_as_they_grow(sized, monkeypatch):
    made, tried = sized
    memory = [0]
    monkeypatch.setattr(module, "MAX_BYTES_OF_GROUP", 305 * MIB)
    monkeypatch.setattr(module, "GrammarUsage", partial(GrammarUsage, resident=lambda: memory[-1]))
    first = made.compile(structure("choice", ["a"]))
    made.compile(structure("choice", ["b"])).result(PATIENCE)
    assert made.compile(structure("choice", ["a"])) is first
    first.result(PATIENCE).usage.grow(memory.append, 10 * MIB)
    assert first.result(PATIENCE).size == 110 * MIB
    for name in "cab":
        made.compile(structure("choice", [name])).result(PATIENCE)
    assert tried == ["a", "b", "c", "b"]


def test_the_oldest_grammars_make_room(sized):
    made, tried = sized
    for name in "abacab":
        made.compile(structure("choice", [name])).result(PATIENCE)
    assert tried == ["a", "b", "c", "b"]


def test_grammars_whose_clients_have_left_do_not_disturb_those_that_need_room(sized, monkeypatch):
    made, _ = sized
    for name in "ab":
        made.compile(structure("choice", [name])).result(PATIENCE)
    cancelled = []

    def run(*_):
        cancelled.append(made.compile(structure("choice", [f"left {len(cancelled)}"])).cancel())
        return 100 * MIB

    monkeypatch.setattr(trial.Trial, "run", run)
    assert made.compile(structure("choice", ["c"])).result(PATIENCE).matcher()
    assert cancelled == [True]


def test_grammars_that_sequences_use_are_counted_when_they_are_not_cached(sized):
    made, tried = sized
    matchers = [made.compile(structure("choice", [name]), "eve").result(PATIENCE).matcher() for name in "ab"]
    for _ in range(2):
        with pytest.raises(QueueFull, match="your grammars take as much memory as they may") as full:
            made.compile(structure("choice", ["c"]), "eve").result(PATIENCE)
        assert full.value.retry_after > 0
    for tenant in ("alice", "bob", "carol", "dave"):
        assert made.compile(structure("choice", ["c"]), tenant).result(PATIENCE).matcher()
    assert len(tried) == 8
    assert all(allowed(matcher) for matcher in matchers)
    del matchers[0]
    assert made.compile(structure("choice", ["c"]), "eve").result(PATIENCE)


def test_the_grammars_of_all_tenants_together_have_a_limit_too(sized, monkeypatch):
    made, _ = sized
    monkeypatch.setattr(module, "MAX_BYTES", 300 * MIB)
    used = [made.compile(structure("choice", ["a"]), tenant).result(PATIENCE).matcher() for tenant in ("alice", "bob", "carol")]
    with pytest.raises(QueueFull, match="the grammars of all requests take as much memory"):
        made.compile(structure("choice", ["a"]), "dave").result(PATIENCE)
    used.pop()
    assert made.compile(structure("choice", ["a"]), "dave").result(PATIENCE)


def test_a_worn_grammar_is_counted_while_a_sequence_uses_it(sized):
    made, _ = sized
    form = structure("choice", ["a"])
    matchers = []
    for _ in range(2):
        grammar = made.compile(form).result(PATIENCE)
        matchers.append(grammar.matcher())
        grammar.usage.broken = True
    del grammar
    with pytest.raises(QueueFull, match="memory"):
        made.compile(form).result(PATIENCE)
    matchers.clear()
    assert made.compile(form).result(PATIENCE)


def test_many_grammars_of_one_tenant_evict_its_own(vocabulary, monkeypatch):
    made = Grammars(vocabulary)
    monkeypatch.setattr(made, "_start", lambda: None)
    monkeypatch.setattr(module, "MAX_KEPT", 4)
    ours = [made.compile(structure("choice", ["a"]), tenant) for tenant in ("alice", "bob")]
    theirs = [made.compile(structure("choice", [str(number)]), "eve") for number in range(9)]
    assert [made.compile(structure("choice", ["a"]), tenant) for tenant in ("alice", "bob")] == ours
    assert made.compile(structure("choice", ["8"]), "eve") is theirs[8]
    assert made.compile(structure("choice", ["0"]), "eve") is not theirs[0]


DEAD_BRANCH = 'start: /[b-zA-Z]/ x | "a"\nx: "c" Z\nZ: /q/ & /r/\n'
"""Most answers of one letter cannot be continued, but one can."""


def test_a_grammar_some_of_whose_answers_have_no_end_is_allowed(grammars, tokenizer):
    matcher = grammars.compile(structure("grammar", DEAD_BRANCH)).result(PATIENCE).matcher()
    matcher.accept(*tokenizer.encode("a"))


def test_a_grammar_is_compiled_once_and_a_refusal_found_once(grammars):
    assert grammars.compile(structure("choice", ["a"])) is grammars.compile(StructuredOutput("choice", '["a"]', "guided_choice"))
    refused = grammars.compile(structure("regex", "("))
    assert refused.exception(PATIENCE)
    assert grammars.compile(structure("regex", "(")) is refused


def test_the_least_asked_for_are_let_go(vocabulary, monkeypatch):
    made = Grammars(vocabulary)
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    first, second = (made.compile(structure("choice", [name])) for name in "ab")
    assert made.compile(structure("choice", ["a"])) is first
    made.compile(structure("choice", ["c"])).result(PATIENCE)
    assert made.compile(structure("choice", ["a"])) is first
    assert made.compile(structure("choice", ["b"])) is not second
    made.close()


def test_a_grammar_that_waits_for_compilation_is_waited_for_by_others_too(vocabulary, monkeypatch):
    made = Grammars(vocabulary)
    monkeypatch.setattr(made, "_start", lambda: None)
    waiting = made.compile(structure("choice", ["a"]))
    assert made.compile(structure("choice", ["a"])) is waiting
    assert waiting.cancel()
    assert made.compile(structure("choice", ["a"])) is not waiting, "a cancelled one is compiled when it is requested again"


def test_a_trial_whose_process_ends_is_no_verdict(vocabulary, monkeypatch):
    made = Grammars(vocabulary)
    with monkeypatch.context() as broken:
        gone = [sys.executable, "-c", ""]
        process = subprocess.Popen(gone, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        broken.setattr(trial.subprocess, "Popen", lambda *arguments, **settings: process)
        with pytest.raises(RequestFailed, match="try again"):
            made.compile(structure("choice", ["a"])).result(PATIENCE)
    process.wait(PATIENCE)
    assert made.compile(structure("choice", ["a"])).result(PATIENCE).matcher()
    made.close()


def test_a_tokenizer_that_cannot_be_read_refuses_every_form(tmp_path):
    made = Grammars(Vocabulary(tmp_path / "tokenizer.json", 300, (256,)))
    with pytest.raises(InvalidRequest, match="tokenizer can't be used with grammars"):
        made.compile(structure("json_object")).result(PATIENCE)
    made.close()


def test_reading_a_vocabulary_lets_other_threads_run():
    tokens = {chr(0x21 + i): i for i in range(94)} | {f"{i:06x}": 94 + i for i in range(40_000)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(tokens, []))
    made.decoder = tokenizers.decoders.ByteLevel()
    data = made.to_str().encode()
    assert share_beside(lambda: GrammarVocabulary(data, size=len(tokens), ends=(0,))) > 0.25


HERMES = ToolCallFormat(begin="<tool_call>\n", separator="\n</tool_call>\n<tool_call>\n", end="\n</tool_call>")
LLAMA = ToolCallFormat(between='", "parameters": ')
MISTRAL = ToolCallFormat(begin="[CALL]", before="", between="", after="", separator="[CALL]")
TOOLS = {"get_weather": WEATHER, "stop": None}


@pytest.mark.parametrize(
    ("form", "several", "good", "bad"),
    [
        (HERMES, False, '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Bern"}}\n</tool_call>', '{"name": "get_weather"'),
        (LLAMA, False, '{"name": "stop", "parameters": {}}', '{"name": "go", "parameters": {}}'),
        (HERMES, True, "\n".join(['<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'] * 3), "hello"),
        (MISTRAL, True, '[CALL]get_weather{"city":"x"}[CALL]stop{}', "[CALL]get_weather{}"),
        (MISTRAL, False, "[CALL]stop{}", "[CALL]stop{}[CALL]stop{}"),
    ],
)
def test_a_call_can_be_forced_in_the_syntax_of_the_model(grammars, tokenizer, form, several, good, bad):
    [control] = tokenizer.encode("[CALL]")
    forced = calls_grammar(form, TOOLS, {"[CALL]": control}, several=several)
    assert forced.param == "tools"
    assert takes(grammars, tokenizer, forced, good)
    assert not takes(grammars, tokenizer, forced, bad)


@pytest.mark.slow
def test_tools_whose_schemas_are_too_long_cannot_be_forced():
    with pytest.raises(InvalidRequest, match="offer fewer tools") as refused:
        calls_grammar(HERMES, {"f": {"description": "x" * MAX_GRAMMAR}}, {}, several=False)
    assert refused.value.param == "tools"


def test_an_error_names_the_tool_and_does_not_quote_the_grammar(grammars):
    tools = {"fine": {"type": "object"}, "wrong": {"type": "object", "properties": {"a": {"type": "hiccup"}}}, "last": None}
    forced = calls_grammar(HERMES, tools, {}, several=True)
    with pytest.raises(InvalidRequest, match=r"^the parameters of wrong: Invalid type: hiccup$"):
        grammars.compile(forced).result(PATIENCE)
    with pytest.raises(InvalidRequest) as refused:
        grammars.compile(structure("grammar", 'start: "secret" foo\n')).result(PATIENCE)
    assert "foo" in str(refused.value)
    assert "secret" not in str(refused.value)


TAGS = [
    Tag("<f>", {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}, "</f>"),
    Tag("<fun>", {}, ";"),
]
TAGS += [Tag("[g]", {"type": "boolean"}, "")]


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("no tags", True),
        ('So <f>{"a":1}</f> and <fun>7; or [g]true.', True),
        ('<f>{"b": 1}</f>', False),
        ("<fun>7", False),
        ("<for>", False),
        ("[g]7", False),
        ("[g", True),
    ],
)
def test_a_trigger_begins_a_structure(grammars, tokenizer, text, good):
    assert takes(grammars, tokenizer, tags_grammar(TAGS, ["<f", "[g]"], "response_format"), text) == good
