"""Which compiled grammars are kept, and who pays for their memory."""

import json
import subprocess
import sys

import pytest
from grammar_forms import PATIENCE, allowed, structure

from chairlift.errors import QueueFull, RequestFailed
from chairlift.grammar import grammars as module
from chairlift.grammar import trial
from chairlift.grammar.grammars import Grammars
from chairlift.sampling import StructuredOutput

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
    monkeypatch.setattr(module, "MAX_BYTES_OF_GROUP", 305 * MIB)
    first = made.compile(structure("choice", ["a"]))
    made.compile(structure("choice", ["b"])).result(PATIENCE)
    assert made.compile(structure("choice", ["a"])) is first
    first.result(PATIENCE).usage.lexer_bytes += 10 * MIB
    assert first.result(PATIENCE).size == 110 * MIB
    for name in "cab":
        made.compile(structure("choice", [name])).result(PATIENCE)
    assert tried == ["a", "b", "c", "b"]


def test_the_states_that_masks_add_to_the_lexer_are_counted(grammars, tokenizer):
    grammar = grammars.compile(structure("regex", r"(.|\n)*[ab](.|\n){12}end")).result(PATIENCE)
    matcher, before = grammar.matcher(), grammar.size
    for token in tokenizer.encode("abcabcbacbacabbcab"):
        allowed(matcher)
        matcher.accept(token)
    assert before + 10_000 < grammar.size < before + 10_000_000


def test_memory_returns_to_the_system_after_much_of_it_is_free(sized, monkeypatch):
    made, _ = sized
    trims = []
    monkeypatch.setattr(module, "trim", lambda: trims.append(made._lock.locked()))  # noqa: SLF001
    for name in "abcd":
        made.compile(structure("choice", [name])).result(PATIENCE)
    assert trims == [False, False], "one for each grammar that made room, while requests can be added"


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
