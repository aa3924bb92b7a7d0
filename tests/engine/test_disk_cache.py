"""The prefix cache on disk: a restarted engine answers with it, bit for bit, and files that differ are never used."""

import asyncio
import logging
import stat
from concurrent.futures import Future
from queue import SimpleQueue
from types import SimpleNamespace

import async_engine
import gguf_recurrent
import numpy as np
import pytest

from chairlift import LLM, SamplingParams, Scheduling
from chairlift.engine import disk_cache
from chairlift.engine.disk_cache import DiskCache, StoredPrefix
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.frames import Abort, Add
from chairlift.engine.hosted_engine import HostedEngine
from chairlift.engine.prefix_store import PrefixStore
from chairlift.errors import InvalidSetting

PROMPT = "The chairlift carries skiers up the hill while the sun shines. " * 2
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)


@pytest.fixture
def start(byte_model, tmp_path):
    """Makes an LLM with a prefix cache on disk."""

    def start(**settings):
        return LLM(byte_model, **{"load_format": "dummy", "block_size": 8, "prefix_cache_dir": str(tmp_path / "kv"), **settings})

    return start


def answer(llm, prompt=PROMPT, **fields):
    """The tokens, their log-probabilities, and the number of cached prompt tokens."""
    [output] = llm.generate([prompt], PARAMS, **fields)
    return output.token_ids, [token.logprob for token in output.logprobs], output.cached_tokens


def counts(llm):
    stats = llm.engine.stats()
    return stats.disk_blocks_read, stats.disk_blocks_written


def files(tmp_path):
    return sorted((tmp_path / "kv").glob("*/*"))


def whole(llm):
    return (len(llm.tokenizer.encode(PROMPT)) - 1) // 8


def test_a_restarted_engine_finds_the_prefix_and_gives_the_same_bits(start, tmp_path):
    with start() as llm:
        first = answer(llm)
        assert counts(llm) == (0, 0)
    assert first[2] == 0
    with start() as llm:
        again = answer(llm)
        assert again[:2] == first[:2]
        assert again[2] == 8 * whole(llm) == 8 * counts(llm)[0]
        longer = answer(llm, PROMPT + "More.")
    assert len(files(tmp_path)) > whole(llm)  # blocks of answers are kept too
    with start(prefix_cache_dir=None) as llm:
        assert answer(llm, PROMPT + "More.")[:2] == longer[:2]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path)} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kv", files(tmp_path)[0].parent)} == {0o700}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """The file of a model with recurrent layers."""
    directory = tmp_path_factory.mktemp("hybrid")
    gguf_recurrent.write(gguf_recurrent.rounded_model("lfm2"), directory / "tiny.gguf")
    return directory / "tiny.gguf"


@pytest.fixture
def start_hybrid(hybrid, tmp_path):
    """Makes an LLM of a model with recurrent layers and with a prefix cache on disk."""
    directories = {"prefix_cache_dir": str(tmp_path / "kv"), "cache_dir": str(hybrid.parent / "cache")}
    small = {"device": "cpu", "threads": 1, "block_size": 8, "num_kv_blocks": 60, "max_num_seqs": 2, **directories}
    return lambda **settings: LLM(str(hybrid), **small | settings)


def tokens_of(output):
    return output.token_ids, [token.logprob for token in output.logprobs], output.cached_tokens


def test_a_restarted_engine_goes_on_from_the_states_of_a_hybrid_model(start_hybrid):
    prompt = np.random.default_rng(1).integers(0, 256, 75).tolist()
    with start_hybrid() as llm:
        first = llm.generate([prompt], PARAMS)[0]
        with llm.open(prompt[:50]) as sequence:
            sequence.generate(PARAMS)
            text = list(sequence.token_ids)
    with start_hybrid() as llm:
        again = llm.generate([prompt], PARAMS)[0]
        assert tokens_of(again) == (*tokens_of(first)[:2], 72)
        # Of 86 computed tokens, the state at the last full block of the answer is kept.
        turn = llm.generate([prompt + first.token_ids + [5] * 9], PARAMS)[0]
        assert turn.cached_tokens == 80
        # A live sequence with the text of one that ended with the engine.
        before = counts(llm)[0]
        with llm.open(text) as sequence:
            live = sequence.generate(PARAMS)
            # Six of its seven blocks with a state are in memory.
            assert counts(llm)[0] == before + 1
        llm.engine.check()
    with start_hybrid(prefix_cache_dir=None) as llm:
        plain = llm.generate([prompt + first.token_ids + [5] * 9], PARAMS)[0]
        assert tokens_of(plain)[:2] == tokens_of(turn)[:2]
        assert tokens_of(llm.generate([text], PARAMS)[0])[:2] == tokens_of(live)[:2]


def test_blocks_are_read_only_up_to_a_sound_file_of_a_state(start_hybrid, tmp_path):
    prompt = np.random.default_rng(2).integers(0, 256, 75).tolist()
    with start_hybrid() as llm:
        llm.generate([prompt[:40]], PARAMS)
        first = llm.generate([prompt], PARAMS)[0]
    states = [path for path in files(tmp_path) if disk_cache.STATE in path.read_bytes()]
    assert len(states) == 5, "the ends of two prompts and of two answers, and where the prompts part"
    store = PrefixStore(str(tmp_path / "kv"), 1 << 30, states[0].parent.name)
    name = store.root("")
    for at in range(0, 72, 8):
        name = store.name(name, np.array(prompt[at : at + 8], np.int32).tobytes())
    end = states[0].with_name(store.name(name, disk_cache.STATE).hex())
    for damaged, cached in (([], 72), ([end], 40), (states, 0)):
        for path in damaged:
            path.write_bytes(path.read_bytes()[:-1])
        with start_hybrid() as llm:
            assert tokens_of(llm.generate([prompt], PARAMS)[0]) == (*tokens_of(first)[:2], cached)
            assert counts(llm)[0] == cached / 8


def test_states_are_written_before_new_ones_evict_them(start_hybrid, monkeypatch, tmp_path):
    monkeypatch.setattr(disk_cache, "WRITE_SECONDS", 0.0)
    prompts = [np.random.default_rng(seed).integers(0, 256, 30).tolist() for seed in range(12)]
    with start_hybrid(num_kv_blocks=400) as llm:
        for prompt in prompts:
            llm.generate([prompt], PARAMS)
        assert llm.engine.stats().saved_states <= llm.engine.stats().state_slots == 12
        assert llm.engine.blocks_used()[1] < 200, "blocks are left"
        # The state of the first prompt was evicted, and is read.
        assert llm.generate([prompts[0]], PARAMS)[0].cached_tokens == 24


def test_salted_prompts_are_neither_written_nor_read(start, tmp_path):
    with start() as llm:
        answer(llm, scheduling=Scheduling(cache_salt="secret"))
    assert files(tmp_path) == []
    with start() as llm:
        answer(llm)
    with start() as llm:
        assert answer(llm, scheduling=Scheduling(cache_salt="secret"))[2] == 0
        assert answer(llm)[2] > 0
        assert llm.engine.read_prefix(EngineRequest.of(1, llm.tokenizer.encode(PROMPT), PARAMS)) is None  # all of it is in memory


def test_groups_keep_their_prefixes_apart_on_disk(start, tmp_path):
    """A group is no secret, so its blocks are written, and are found by its tenants only."""
    groups = {"alice": "team", "bob": "team", "carol": "others", "dave": "=dave", "erin": "=erin", "frank": ""}

    def cached(llm, tenant):
        return answer(llm, scheduling=Scheduling(tenant=tenant, cache_group=groups[tenant]))[2]

    with start() as llm:
        assert [cached(llm, tenant) > 0 for tenant in ("alice", "bob", "carol", "dave", "dave")] == [False, True, False, False, True]
    written = len(files(tmp_path))
    with start() as llm:
        assert [cached(llm, tenant) > 0 for tenant in ("bob", "carol", "dave")] == [True, True, True]
        assert cached(llm, "erin") == 0
    assert len(files(tmp_path)) == 4 * written / 3
    with start() as llm:
        assert cached(llm, "frank") == 0, "without a group none of their files is read"


def test_adapters_and_scored_prompts_read_nothing(start):
    with start() as llm:
        answer(llm)
    with start() as llm:
        ids = llm.tokenizer.encode(PROMPT)
        for params in (SamplingParams(lora="french"), SamplingParams(prompt_logprobs=1)):
            assert llm.engine.read_prefix(EngineRequest.of(1, ids, params)) is None
        assert llm.engine.read_prefix(EngineRequest.of(1, ids, PARAMS)).result().kv


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "gone", "unreadable"])
def test_a_damaged_file_is_a_miss(start, tmp_path, damage):
    with start() as llm:
        first = answer(llm)
    for path in files(tmp_path):
        content = path.read_bytes()
        if damage == "gone":
            path.unlink()
        elif damage == "unreadable":
            path.unlink()
            path.mkdir()
        elif damage == "flipped":
            path.write_bytes(content[:-99] + bytes([content[-99] ^ 1]) + content[-98:])
        else:
            path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    with start() as llm:
        again = answer(llm)
        assert again == first
        assert counts(llm)[0] == 0


def test_other_numbers_do_not_share_files(start, tmp_path):
    with start(kv_cache_dtype="float16") as llm:
        answer(llm)
    with start() as llm:
        assert answer(llm)[2] == 0


def test_blocks_are_written_before_new_ones_evict_them(start, monkeypatch, tmp_path):
    monkeypatch.setattr(disk_cache, "WRITE_SECONDS", 0)
    with start(num_kv_blocks=60, max_model_len=200) as llm:
        first = answer(llm)
        for index in range(12):
            answer(llm, f"{index} {PROMPT}")
        written = counts(llm)[1]
        assert written > whole(llm)
        again = answer(llm)
        assert again[:2] == first[:2]
        assert again[2] > 0
        assert counts(llm)[0] > 0


def test_parked_sessions_find_their_contexts_on_disk(start, tmp_path):
    small = {"num_kv_blocks": 60, "max_model_len": 300}

    def turns(**settings):
        """Turns of two sessions, of which one fits into the cache."""
        with start(**small, **settings) as llm:
            outputs = []
            for name in "aba":
                outputs.append(answer(llm, prompt := f"{name} {PROMPT * 2}", scheduling=Scheduling(session=name)))
                llm.engine.save_prefixes(5.0)  # as a working engine does within a second
            llm.engine.check()
            return outputs, counts(llm)[0], 8 * ((len(llm.tokenizer.encode(prompt)) - 1) // 8)

    found, read, whole = turns(journal=str(tmp_path / "j"))
    computed, _, _ = turns(prefix_cache_dir=None)
    assert [output[:2] for output in found] == [output[:2] for output in computed]
    assert [output[2] for output in found] == [0, 0, whole]
    assert computed[2][2] < whole
    assert read > 0
    from chairlift import _core

    assert _core.replay((tmp_path / "j").read_bytes())["differs_at"] is None


def test_a_parked_session_s_context_is_read_when_its_turn_has_come(start, monkeypatch):
    with start(num_kv_blocks=60, max_model_len=300) as llm:
        engine, inbox, begun = llm.engine, SimpleQueue(), []
        hosted = HostedEngine(engine, lambda _: None, inbox.put)
        read: Future[StoredPrefix] = Future()

        def read_prefix(request):
            begun.append(request.tag)
            return read if request.tag == 2 else None

        monkeypatch.setattr(engine, "read_prefix", read_prefix)
        for tag in (1, 2):
            request = EngineRequest.of(tag, [tag] * 250, PARAMS, scheduling=Scheduling(session=str(tag)))
            hosted.handle(Add(tag, request.pack()))
            assert begun == [1]
            engine.step()
        assert {one["tag"]: one["state"] for one in engine.snapshot()["waiting"]} == {2: "wait_session"}
        while len(begun) == 1:
            engine.step()
        while engine.step() is not None:
            assert begun == [1, 2]
        assert {one["tag"]: one["state"] for one in engine.snapshot()["waiting"]} == {2: "read_cache"}
        read.set_result(StoredPrefix(np.zeros(0, np.int32), 0, []))
        hosted.handle(inbox.get_nowait())
        while engine.has_work:
            engine.step()
        assert engine.explain(2)["finish"] == "length"
        assert min(engine.explain(2)["states"][state] for state in ("wait_session", "read_cache")) > 0


def test_a_journal_with_restored_blocks_replays(start, tmp_path):
    with start() as llm:
        answer(llm)
    with start(journal=str(tmp_path / "j")) as llm:
        assert answer(llm)[2] > 0
        answer(llm, PROMPT + "Another.")
    from chairlift import _core

    replayed = _core.replay((tmp_path / "j").read_bytes())
    assert replayed["differs_at"] is None


@pytest.mark.parametrize("flags", [{"load_format": "none"}, {"enable_prefix_caching": False}, {"runner": "torch"}])
def test_engines_without_such_blocks_refuse_the_flag(start, flags):
    with pytest.raises(InvalidSetting, match="--prefix-cache-dir"):
        start(**flags)


def test_a_full_disk_is_logged_once_and_disturbs_nothing(start, monkeypatch, tmp_path, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    with start() as llm, caplog.at_level(logging.WARNING):
        answer(llm)
        monkeypatch.setattr("chairlift.engine.prefix_store.open", full, raising=False)
    assert [record.message.count("No space left") for record in caplog.records] == [1]
    monkeypatch.undo()
    assert files(tmp_path) == []


@pytest.fixture
def cache(tmp_path):
    """The disk cache of a scheduler whose cache has five first blocks, without an engine."""
    computed = [(number, number + 1, 0, bytes([number] * 8), "") for number in range(5)]  # number, content, the one before, tokens, group
    scheduler = SimpleNamespace(remember_users=int, unused=float, stored_blocks=lambda newest: computed[newest:])
    blocks = SimpleNamespace(read=lambda number: bytes([number] * 1000))
    cache = DiskCache(scheduler, blocks, None, 8, 2, PrefixStore(str(tmp_path / "kv"), 1 << 20, "ab" * 16))
    yield cache
    cache.close()


def test_an_error_of_the_store_is_logged_once_and_ends_nothing(cache, monkeypatch, tmp_path, caplog):
    def fails(*_):
        raise ValueError("a name that is none")

    monkeypatch.setattr(disk_cache, "WRITE_SECONDS", 0)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(PrefixStore, "write", fails)
        cache.write_some()
        cache.save(9.0)
    assert [(record.message, str(record.exc_info[1])) for record in caplog.records] == [
        ("--prefix-cache-dir: a block cannot be written", "a name that is none")
    ]
    assert cache.stats()["disk_blocks_written"] == len(files(tmp_path)) == 0
    cache.save(9.0)
    assert cache.stats()["disk_blocks_written"] == len(files(tmp_path)) == 5


def test_a_block_that_cannot_be_written_does_not_keep_the_others_from_it(cache, monkeypatch, tmp_path):
    write = PrefixStore.write
    monkeypatch.setattr(
        PrefixStore, "write", lambda store, name, parent, tokens, kv: tokens[0] != 1 and write(store, name, parent, tokens, kv)
    )
    cache.save(9.0)
    assert sorted(path.read_bytes()[-20] for path in files(tmp_path)) == [0, 2, 3, 4]
    assert cache.stats()["disk_blocks_written"] == 4


def test_the_engine_s_process_finds_what_an_earlier_one_wrote(byte_model, tmp_path):
    settings = {"load_format": "dummy", "block_size": 8, "prefix_cache_dir": str(tmp_path / "kv")}
    found = []

    async def ask(engine):
        outputs = await async_engine.collect(engine, PROMPT, **vars_of(PARAMS))
        found.append((async_engine.ids(outputs), outputs[-1].timeline))

    async_engine.run(ask, model=str(byte_model), **settings)
    async_engine.run(ask, model=str(byte_model), **settings)
    (first, cold), (again, warm) = found
    assert again == first
    assert cold.cached_tokens == 0 < warm.cached_tokens


def test_a_request_waits_for_its_kv_in_the_queue_beside_the_others(start, monkeypatch):
    with start() as llm:
        engine, inbox, reads = llm.engine, SimpleQueue(), {1: Future(), 2: None, 3: Future()}
        hosted = HostedEngine(engine, lambda _: None, inbox.put)
        monkeypatch.setattr(engine, "read_prefix", lambda request: reads[request.tag])

        def run():
            """The tags that get tokens until there is nothing to run."""
            served = set()
            while (report := engine.step()) is not None:
                served |= set(np.frombuffer(report.tags, np.uint64).tolist())
            return served

        for tag in reads:
            hosted.handle(Add(tag, EngineRequest.of(tag, [tag], PARAMS).pack()))
        assert run() == {2}
        assert {one["tag"]: one["state"] for one in engine.snapshot()["waiting"]} == dict.fromkeys((1, 3), "read_cache")
        hosted.handle(Abort([3]))
        for read in (reads[1], reads[3]):
            read.set_result(StoredPrefix(np.zeros(0, np.int32), 0, []))
            hosted.handle(inbox.get_nowait())
        assert run() == {1}
        assert engine.explain(1)["states"]["read_cache"] > 0
        assert engine.explain(3)["finish"] == "abort"
        assert not engine.has_work


def test_a_request_that_is_aborted_while_its_kv_is_read_is_forgotten(byte_model, tmp_path):
    settings = {"load_format": "dummy", "block_size": 8, "prefix_cache_dir": str(tmp_path / "kv")}

    async def test(engine):
        stream = engine.generate(PROMPT, PARAMS)
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert len(async_engine.ids(await async_engine.collect(engine, PROMPT, **vars_of(PARAMS)))) == PARAMS.max_tokens

    for _ in range(2):
        async_engine.run(test, model=str(byte_model), **settings)


def vars_of(params):
    return {"max_tokens": params.max_tokens, "temperature": 0, "ignore_eos": True}
