"""Forms compiled over a small vocabulary: what they let through, what is refused, and what compiling may cost."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from free_interpreter import share_beside
from grammar_forms import PATIENCE, WEATHER, allowed, structure

from chairlift._core import GrammarVocabulary
from chairlift.errors import InvalidRequest, QueueFull
from chairlift.grammar import trial, usage
from chairlift.grammar.allowance import Allowance
from chairlift.grammar.grammar import check
from chairlift.grammar.grammars import Grammars
from chairlift.grammar.source import Tag, ToolCallFormat, calls_grammar, tags_grammar
from chairlift.grammar.trial import Vocabulary, compiled
from chairlift.grammar.usage import GrammarUsage
from chairlift.sampling import StructuredOutput


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
def test_a_form_lets_through_what_it_describes_and_nothing_else(takes, form, good, bad):
    assert [text for text in good if not takes(form, text)] == []
    assert [text for text in bad if takes(form, text)] == []


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


@pytest.mark.parametrize("form", [structure("choice", ["</s>"]), structure("json", {"enum": ["</s>"]})], ids=lambda form: form.kind)
def test_a_forced_text_is_no_control_token(grammars, tokenizer, form):
    matcher, written = grammars.compile(form).result(PATIENCE).matcher(), []
    while forced := matcher.forced():
        assert not {*forced} & tokenizer.special_token_ids
        for token in forced:
            assert allowed(matcher) == {token}
            matcher.accept(token)
        written += forced
    assert tokenizer.decode(written) in ("</s>", '"</s>"')


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
def test_a_compact_answer_has_no_whitespace_between_json_tokens(takes, form):
    assert takes(form, '{"a":1,"b":[1,2]}')
    for spaced in ('{"a": 1}', '{"a" :1}', '{ "a":1}', '{"a":1 }', '{"a":1, "b":2}', '{"a":[1, 2]}', '{"a":\n1}'):
        assert not takes(form, spaced)


def test_a_schema_says_which_whitespace_may_come(takes):
    tags = tags_grammar([Tag("<f>", COMPACT, "</f>"), Tag("<g>", SPACED, "</g>")], ["<f>", "<g>"], "response_format")
    for text, good in (("<f>[1,2]</f>", True), ("<f>[1, 2]</f>", False), ("<g>[1, 2]</g>", True), ("<g>[1,\n2]</g>", False)):
        assert takes(tags, text) == good
    unbounded = structure("json", {"x-guidance": {"whitespace_flexible": True}})
    assert takes(unbounded, f"{{{' ' * 65}}}")


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
def test_space_is_bounded_whatever_else_a_schema_says(takes, form, spaces):
    begin = "" if form.kind == "json" else "<f>"
    assert takes(form, f"{begin}{{{' ' * spaces}}}")
    assert not takes(form, f"{begin}{{{' ' * (spaces + 1)}}}")


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
def test_large_grammars_are_served(takes, form, text):
    assert takes(form, text)
    assert not takes(form, "~")


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


DEAD_BRANCH = 'start: /[b-zA-Z]/ x | "a"\nx: "c" Z\nZ: /q/ & /r/\n'
"""Most answers of one letter cannot be continued, but one can."""


def test_a_grammar_some_of_whose_answers_have_no_end_is_allowed(grammars, tokenizer):
    matcher = grammars.compile(structure("grammar", DEAD_BRANCH)).result(PATIENCE).matcher()
    matcher.accept(*tokenizer.encode("a"))


def test_a_tokenizer_that_cannot_be_read_refuses_every_form(tmp_path):
    made = Grammars(Vocabulary(tmp_path / "tokenizer.json", 300, (256,)))
    with pytest.raises(InvalidRequest, match="tokenizer can't be used with grammars"):
        made.compile(structure("json_object")).result(PATIENCE)
    made.close()


def test_a_model_may_have_fewer_tokens_than_its_tokenizer(byte_model, tokenizer):
    whole, letter, end = (tokenizer.encode(text)[0] for text in ("ab", "a", "b"))
    size = whole  # "ab" is the first token that the model lacks
    assert size % 32
    loaded = Vocabulary(byte_model / "tokenizer.json", size, (end,)).load()
    mask = np.frombuffer(compiled(loaded, structure("regex", "[ac]b+")).mask(), np.uint8)
    assert len(mask) == 4 * -(-size // 32)
    assert np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist() == [letter, *tokenizer.encode("c")]
    assert compiled(loaded, structure("regex", "abab")).forced() == []


def test_reading_a_vocabulary_lets_other_threads_run():
    tokens = {chr(0x21 + i): i for i in range(94)} | {f"{i:06x}": 94 + i for i in range(40_000)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(tokens, []))
    made.decoder = tokenizers.decoders.ByteLevel()
    data = made.to_str().encode()
    assert share_beside(lambda: GrammarVocabulary(data, size=len(tokens), ends=(0,))) > 0.25
