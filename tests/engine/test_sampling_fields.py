"""What requests ask of sampling, through `LLM` and `AsyncEngine`, over a tiny model of transformers' own with letters for tokens."""

import asyncio
import itertools
import json
import shutil
import string
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from cpu_cost import cost
from gguf_files import sentencepiece_metadata, write_vocabulary

from chairlift import LLM, AsyncEngine, SamplingParams
from chairlift.engine import stream as client_request
from chairlift.engine.choice import ERROR, STOP, Choice
from chairlift.engine.frames import StepOutputs
from chairlift.engine.stream import Stream, add_part, deliver, joined
from chairlift.engine.validation import encode_bad_words
from chairlift.errors import InvalidRequest
from chairlift.outputs import RequestOutput, TokenLogprobs
from chairlift.sampling import MAX_BAD_WORDS, StructuredOutput
from chairlift.tokenizer import Tokenizer

VOCABULARY = 64
LETTERS = string.ascii_letters + " .,;:!?-"
END, OTHER_END = 60, 61
NEW = 12
PLAIN = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
PROMPTS = [np.random.default_rng(length).integers(0, len(LETTERS), length).tolist() for length in (33, 5, 48, 17, 1, 40)]
Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    path: Path = tmp_path_factory.mktemp("letters")
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=256, initializer_range=0.2, eos_token_id=None, bos_token_id=None, **sizes
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    names = {letter: token for token, letter in enumerate(LETTERS)} | {f"<{token}>": token for token in range(len(LETTERS), VOCABULARY)}
    tokenizer = Backend(models.WordLevel(names, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken(f"<{token}>", special=True) for token in (END, OTHER_END)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    # The only file that says which token ends a text, and by its name alone.
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": f"<{END}>"}))
    return path


@pytest.fixture(scope="module")
def likelihoods(directory: Path) -> Callable[[list[int]], torch.Tensor]:
    """The log-probabilities of every token after each of some tokens, by transformers."""
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def ask(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return found

    return ask


@pytest.fixture(scope="module")
def make(directory: Path) -> Make:
    def llm(**settings: object) -> LLM:
        roomy = {"num_kv_blocks": 200, "block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        return LLM(str(directory), **roomy | settings)

    return llm


@pytest.fixture(scope="module")
def llm(make: Make) -> LLM:
    return make()


def one(llm: LLM, prompt: str | list[int] = "hello", **settings: object) -> RequestOutput:
    (output,) = llm.generate([prompt], SamplingParams(**{"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True} | settings))
    return output


def check(found: TokenLogprobs, expected: torch.Tensor, token: int, count: int) -> None:
    assert found.token == token
    assert found.logprob == pytest.approx(expected[token].item(), abs=1e-4)
    assert found.rank == 1 + int((expected > expected[token]).sum())
    assert [likely for likely, _ in found.top] == expected.topk(count).indices.tolist()
    assert [logprob for _, logprob in found.top] == pytest.approx(expected.topk(count).values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 2.0, "seed": 4, "presence_penalty": 1.0, "logit_bias": {3: 4.0}, "top_k": 40}, {"allowed_token_ids": (1, 2)}],
    ids=["greedy", "drawn", "allowed"],
)
@pytest.mark.slow
def test_log_probabilities_are_those_of_transformers_before_anything_is_changed(llm, likelihoods, settings):
    outputs = llm.generate(PROMPTS, SamplingParams(**{"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, "logprobs": 5} | settings))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = likelihoods(prompt + output.token_ids)[len(prompt) - 1 :]
        assert len(output.logprobs) == len(output.token_ids) == NEW
        for found, row, token in zip(output.logprobs, expected, output.token_ids, strict=False):
            check(found, row, token, 5)
    assert one(llm).logprobs is None
    assert one(llm).text_offsets is None
    assert one(llm).prompt_logprobs is None
    assert one(llm, logprobs=0).logprobs[0].top == ()


def check_prompt(output: RequestOutput, likelihoods: Callable[[list[int]], torch.Tensor], count: int) -> None:
    prompt = output.prompt_token_ids
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for found, row, token in zip(output.prompt_logprobs[1:], likelihoods(prompt), prompt[1:], strict=False):
        check(found, row, token, count)


@pytest.mark.parametrize("tokens", [8, 13, 64])
@pytest.mark.slow
def test_prompts_are_told_whole_however_they_are_cut_and_cached(make, likelihoods, tokens):
    llm = make(max_num_batched_tokens=tokens)
    asking = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    plain = llm.generate(PROMPTS, PLAIN)
    outputs = llm.generate([*PROMPTS, *PROMPTS], [asking] * len(PROMPTS) + [PLAIN] * len(PROMPTS))
    for output in outputs[: len(PROMPTS)]:
        check_prompt(output, likelihoods, 2)
        assert output.cached_tokens == 0
    assert [output.token_ids for output in outputs[len(PROMPTS) :]] == [output.token_ids for output in plain]
    assert outputs[len(PROMPTS)].cached_tokens > 0
    assert [output.cached_tokens for output in llm.generate(PROMPTS[:1], asking)] == [0]


@pytest.mark.slow
def test_prompts_are_told_once_when_they_lose_their_blocks(make, likelihoods):
    llm = make(num_kv_blocks=24, max_model_len=100)
    params = SamplingParams(temperature=0.0, max_tokens=40, n=2, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    outputs = [answer for output in llm.generate(PROMPTS, params) for answer in output.outputs]
    assert llm.engine.stats().preemptions > 3
    for output in outputs:
        check_prompt(output, likelihoods, 1)
        assert [found.token for found in output.logprobs] == output.token_ids
        expected = likelihoods(output.prompt_token_ids + output.token_ids)[len(output.prompt_token_ids) - 1 :]
        for found, row, token in zip(output.logprobs, expected, output.token_ids, strict=False):
            check(found, row, token, 1)


def test_best_of_keeps_the_likeliest_with_what_was_asked_for(llm, likelihoods):
    params = SamplingParams(temperature=3.0, max_tokens=NEW, n=2, best_of=6, seed=1, logprobs=1, prompt_logprobs=0, ignore_eos=True)
    best = llm.generate([PROMPTS[1]], params)[0].outputs
    every = llm.generate([PROMPTS[1]], SamplingParams(temperature=3.0, max_tokens=NEW, n=6, seed=1, logprobs=0, ignore_eos=True))[0].outputs
    ranked = sorted(every, key=lambda output: -sum(found.logprob for found in output.logprobs))
    assert [output.token_ids for output in best] == [output.token_ids for output in ranked[:2]]
    assert all(len(output.logprobs) == NEW for output in best)
    for output in best:
        check_prompt(output, likelihoods, 0)


def test_bias_and_allowed_tokens(llm):
    favoured = one(llm, logit_bias={5: 100.0})
    assert favoured.token_ids == [5] * NEW
    plain = one(llm)
    assert plain.token_ids[0] not in one(llm, logit_bias=dict.fromkeys(plain.token_ids, -100.0)).token_ids
    for temperature in (0.0, 3.0):
        assert set(one(llm, allowed_token_ids=(3, 9, 11), temperature=temperature, max_tokens=30).token_ids) <= {3, 9, 11}


def test_bad_words_are_not_said_with_or_without_a_space(llm):
    plain = one(llm, max_tokens=30).text
    for length in (1, 2, 3):
        word = plain[4 : 4 + length]
        text = one(llm, max_tokens=30, bad_words=(word,)).text
        assert word.lstrip() not in text
        assert text[: plain.index(word)] == plain[: plain.index(word)]
    # Greedy decoding that may not say its first letter again, nor its substitute, ...
    words: list[str] = []
    for _ in range(5):
        words.append(one(llm, max_tokens=1, bad_words=tuple(words)).text)
    assert len(set(words)) == 5


def test_bad_words_are_spelled_as_the_tokenizer_does(model_dir):
    tokenizer = Tokenizer(model_dir)
    words = encode_bad_words(SamplingParams(bad_words=("hello", "  world peace", (5, 6), " ")), tokenizer).bad_words
    texts = ("hello", " hello", "world peace", " world peace")
    assert words == (*(tuple(tokenizer.encode(text)) for text in texts), (5, 6), tuple(tokenizer.encode(" ")))
    ids_alone = SamplingParams(bad_words=((1, 2),))
    assert encode_bad_words(ids_alone, tokenizer) is ids_alone


def test_bad_words_have_no_space_that_the_tokenizer_adds(tmp_path):
    tokenizer = Tokenizer(write_vocabulary(tmp_path, sentencepiece_metadata()))
    assert tokenizer.strips_first_space
    words = encode_bad_words(SamplingParams(bad_words=("hello", " ")), tokenizer).bad_words
    assert [b"".join(map(tokenizer.piece, word)) for word in words] == [b"hello", b" hello", b" "]


def test_tokens_that_the_checkpoint_suppresses_do_not_count_as_the_callers_words():
    encoding = {"encode": lambda text, **_: [1000, *text.encode()], "strips_first_space": False}
    tokenizer = cast(Tokenizer, SimpleNamespace(suppressed_token_ids=range(MAX_BAD_WORDS), **encoding))
    texts = tuple(f"{number:032d}" for number in range(MAX_BAD_WORDS))
    encoded = encode_bad_words(SamplingParams(bad_words=texts), tokenizer)
    assert len(encoded.bad_words) == 3 * MAX_BAD_WORDS
    lists = tuple((number, 5) for number in range(2 * MAX_BAD_WORDS + 1))
    assert len(encode_bad_words(SamplingParams(bad_words=lists[1:]), tokenizer).bad_words) == 3 * MAX_BAD_WORDS
    for too_many in (lists, (*lists[:-2], "a")):
        with pytest.raises(InvalidRequest, match=r"bad_words"):
            encode_bad_words(SamplingParams(bad_words=too_many), tokenizer)
    with pytest.raises(InvalidRequest, match=r"bad_words"):
        SamplingParams(bad_words=(*texts, "a"))


def test_tokens_that_the_checkpoint_suppresses_are_never_sampled(llm: LLM, directory: Path, tmp_path: Path):
    first, second = (one(llm, bad_words=words).token_ids[0] for words in ((), ((one(llm).token_ids[0],),)))
    model = shutil.copytree(directory, tmp_path / "model")
    settings = {"suppress_tokens": [first, 9999, -1, "b"]}
    (model / "generation_config.json").write_text(json.dumps(settings))
    suppressing = LLM(str(model), num_kv_blocks=200, block_size=8, max_num_seqs=8, max_num_batched_tokens=64)
    for fields in ({}, {"logit_bias": {first: 100.0}}, {"bad_words": ("a",)}):
        assert first not in one(suppressing, **fields).token_ids
    assert one(suppressing).token_ids[0] == second

    async def served() -> list[int]:
        async with asyncio.timeout(120), AsyncEngine(model=str(model), num_kv_blocks=200, block_size=8, max_num_seqs=8) as engine:
            return [token async for part in engine.generate(engine.tokenizer.encode("hello"), PLAIN) for token in part.token_ids]

    assert asyncio.run(served()) == one(suppressing).token_ids


def test_the_end_comes_from_the_tokenizers_settings_and_waits_for_min_tokens(llm):
    assert llm.info.eos_token_ids == [END]
    wants_to_end = {"logit_bias": {END: 100.0, OTHER_END: 50.0}, "ignore_eos": False}
    output = one(llm, **wants_to_end)
    assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == ([END], "", "stop", None)
    output = one(llm, **wants_to_end, min_tokens=4)
    assert output.token_ids == [OTHER_END] * 4 + [END]
    output = one(llm, **wants_to_end, min_tokens=4, stop_token_ids=(OTHER_END, 10_000))
    assert not {END, OTHER_END} & set(output.token_ids[:4])
    assert output.token_ids[4:] == [END]
    assert one(llm, **wants_to_end, skip_special_tokens=False, include_stop_str_in_output=True).text == f"<{END}>"
    assert one(llm, **wants_to_end, skip_special_tokens=False).text == ""
    assert one(llm, **wants_to_end | {"ignore_eos": True}, skip_special_tokens=False, max_tokens=2).text == f"<{END}>" * 2


def test_stop_strings_wait_for_min_tokens_too_and_are_shown_if_asked_for(llm):
    repeated = {"allowed_token_ids": (0,), "stop": ("aa",)}
    cut, late, shown = (one(llm, **repeated, **more) for more in ({}, {"min_tokens": 5}, {"include_stop_str_in_output": True}))
    assert (cut.text, len(cut.token_ids), cut.stop_reason) == ("", 2, "aa")
    assert (late.text, len(late.token_ids)) == ("aaaa", 6)
    assert (shown.text, len(shown.token_ids), shown.finish_reason) == ("aa", 2, "stop")


def test_log_probabilities_end_where_the_tokens_do_and_say_where_they_begin(llm):
    plain = one(llm, max_tokens=30, logprobs=0)
    assert plain.text_offsets == list(range(30))
    stop = plain.text[6:9]
    at = plain.text.index(stop)
    cut = one(llm, max_tokens=30, logprobs=0, stop=(stop,))
    assert cut.text == plain.text[:at]
    assert len(cut.token_ids) == len(cut.logprobs) == len(cut.text_offsets) == at + 3
    assert cut.text_offsets == list(range(at + 3))
    ended = one(llm, logprobs=0, logit_bias={END: 100.0, 7: 50.0}, min_tokens=2, ignore_eos=False)
    assert ended.text == LETTERS[7] * 2
    assert ended.text_offsets == [0, 1, 2]


def test_tokens_taken_together_end_at_the_stop_string_with_all_that_belongs_to_them(llm):
    choice = Choice(llm.tokenizer, 0, [1], SamplingParams(stop=("b",), logprobs=0), arrived=0.0)
    for token in range(4):
        choice.feed(token, -1.0, 0, struct.pack("<ifi", token, -1.0, 1))
    output = choice.take()
    assert (output.text, output.token_ids, output.text_offsets) == ("a", [0, 1], [0, 1])
    assert output.logprobs == [TokenLogprobs(0, -1.0, 1), TokenLogprobs(1, -1.0, 1)]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_a_request_that_can_draw_nothing_fails_alone(llm, logprobs):
    nothing = SamplingParams(temperature=0.0, max_tokens=NEW, allowed_token_ids=(0,), bad_words=((0, 0),), logprobs=logprobs)
    plain = replace(PLAIN, logprobs=logprobs)
    failed, *others = llm.generate([PROMPTS[0], *PROMPTS], [nothing] + [plain] * len(PROMPTS))
    assert (failed.finish_reason, failed.token_ids) == ("error", [0])
    alone = llm.generate(PROMPTS, plain)
    assert [(output.token_ids, output.logprobs) for output in others] == [(output.token_ids, output.logprobs) for output in alone]


@pytest.mark.slow
def test_a_request_that_can_draw_nothing_leaves_its_engine_to_the_others(directory):
    nothing = SamplingParams(temperature=0.0, max_tokens=NEW, allowed_token_ids=(0,), bad_words=((0,),), logprobs=1)
    plain = replace(PLAIN, max_tokens=100)

    async def answer(engine: AsyncEngine, begun: asyncio.Event | None = None) -> list[int]:
        tokens: list[int] = []
        async for part in engine.generate(PROMPTS[1], plain):
            tokens += part.token_ids
            if begun is not None:
                begun.set()
        return tokens

    async def run() -> None:
        async with asyncio.timeout(120), AsyncEngine(model=str(directory), num_kv_blocks=200, block_size=8, max_num_seqs=8) as engine:
            alone, begun = await answer(engine), asyncio.Event()
            beside = asyncio.create_task(answer(engine, begun))
            await begun.wait()
            for _ in range(2):
                with pytest.raises(InvalidRequest, match="allowed_token_ids and bad_words together leave no token"):
                    [_ async for _ in engine.generate(PROMPTS[0], nothing)]
            assert await beside == alone

    asyncio.run(run())


def test_many_answers_with_long_stop_strings_take_no_callback_long(llm):
    params = SamplingParams(n=128, stop=tuple("ab" * 510 + f"{number:04}" for number in range(16)))
    assert cost(lambda: Stream(llm.tokenizer, 10, [1], params)) < 4


def test_increments_are_joined_before_there_are_many(monkeypatch):
    monkeypatch.setattr(client_request, "_PARTS", 4)
    parts = []
    for number in range(11):
        logprobs = [TokenLogprobs(number, -1.0, 1)]
        add_part(parts, RequestOutput(str(number), [number], [1], logprobs=logprobs, text_offsets=[number]))
        assert len(parts) < 4
    whole = joined(parts)
    assert (whole.text, whole.token_ids, whole.text_offsets) == ("012345678910", [*range(11)], [*range(11)])
    assert [one.token for one in whole.logprobs] == [*range(11)]


def test_the_details_of_a_failed_sample_are_no_reason(llm):
    line = struct.pack("<ifi", -1, float("nan"), 1)
    reason = InvalidRequest("too slow", code="grammar_timeout").packed()
    structure = StructuredOutput("regex", "a", "guided_regex")
    for params, detail in ((SamplingParams(logprobs=0), line), (SamplingParams(embed=True), b"\0\0\xc0\x7f" * 48), (PLAIN, b"")):
        choice = Choice(llm.tokenizer, 0, [1], params, arrived=0.0)
        choice.feed(-1, 0.0, ERROR, detail)
        output = choice.take()
        assert (output.finish_reason, output.token_ids, output.embedding, choice.refusal) == ("error", [], None, None)
    choice = Choice(llm.tokenizer, 0, [1], SamplingParams(logprobs=0, structured_output=structure), arrived=0.0)
    choice.feed(-1, 0.0, ERROR, line, reason)
    assert (str(choice.refusal), choice.refusal.code, choice.refusal.param) == ("too slow", "grammar_timeout", "guided_regex")


def test_a_request_whose_output_cannot_be_read_fails_alone(llm):
    embed, plain = (Stream(llm.tokenizer, 10 * number, [1], params) for number, params in enumerate((SamplingParams(embed=True), PLAIN), 1))
    running = {10: embed, 20: plain}
    tags, tokens = struct.pack("<2Q", 10, 20), struct.pack("<2i", -2, 3)
    assert deliver(StepOutputs(tags, tokens, bytes([STOP, 0]), details={10: b"odd"}), running) == [embed, plain]
    assert [output.finish_reason for output in embed.take()] == ["error"]
    assert [(output.finish_reason, output.token_ids) for output in plain.take()] == [(None, [3])]
    assert running == {20: plain}


def test_what_comes_after_an_error_is_not_read(llm, monkeypatch):
    request = Stream(llm.tokenizer, 10, [1], PLAIN)
    running = {10: request}
    tag, token = struct.pack("<Q", 10), struct.pack("<i", 3)
    with monkeypatch.context() as broken:
        broken.setattr(Choice, "feed", lambda *given: 1 / 0)
        deliver(StepOutputs(tag, token, bytes(1)), running)
    assert 10 in running, "its reader aborts it"
    deliver(StepOutputs(tag, token, bytes(1)), running)
    assert [(output.finish_reason, output.token_ids) for output in request.take()] == [("error", [])]


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", {VOCABULARY: 1.0}), ("allowed_token_ids", (0, VOCABULARY)), ("bad_words", ((1, VOCABULARY),))],
)
def test_tokens_that_the_model_has_not_are_refused_by_field(llm, field, value):
    with pytest.raises(InvalidRequest, match=rf"{field} has token {VOCABULARY}, .* 0 to {VOCABULARY - 1}") as caught:
        one(llm, **{field: value})
    assert caught.value.param == field


@pytest.mark.slow
def test_an_engine_in_its_own_process_says_the_same(directory, llm):
    requested = [
        PLAIN,
        SamplingParams(temperature=0.0, max_tokens=NEW, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=1.5, seed=3, max_tokens=NEW, logprobs=1, logit_bias={4: 3.0}, min_tokens=7, n=2),
        SamplingParams(temperature=0.0, max_tokens=NEW, bad_words=("e", "ab"), allowed_token_ids=tuple(range(20)), stop=("c",)),
        SamplingParams(temperature=2.0, seed=9, max_tokens=NEW, n=1, best_of=3, prompt_logprobs=1),
    ]
    pairs = list(itertools.product(PROMPTS[:3], requested))

    async def ask(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[tuple]:
        whole: dict[int, list] = {}
        async for part in engine.generate(prompt, params):
            reported = whole.setdefault(part.index, ["", [], [], [], None])
            reported[0] += part.text
            for place, more in enumerate((part.token_ids, part.logprobs, part.text_offsets), 1):
                reported[place] += more or []
            if part.prompt_logprobs is not None:
                assert reported[4] is None
                assert len(reported[1]) == len(part.token_ids), "it comes with the first tokens"
                reported[4] = part.prompt_logprobs
        return [tuple(whole[index]) for index in sorted(whole)]

    async def run() -> list[list[tuple]]:
        async with asyncio.timeout(120), AsyncEngine(model=str(directory), num_kv_blocks=200, block_size=8, max_num_seqs=8) as engine:
            with pytest.raises(InvalidRequest, match="bad_words has token 64"):
                await ask(engine, [1], SamplingParams(bad_words=((64,),)))
            return await asyncio.gather(*(ask(engine, prompt, params) for prompt, params in pairs))

    whole = llm.generate([prompt for prompt, _ in pairs], [params for _, params in pairs])
    expected = [choice for output in whole for choice in output.outputs]
    found = [answer for answers in asyncio.run(run()) for answer in answers]
    for output, (text, tokens, logprobs, offsets, prompt) in zip(expected, found, strict=True):
        assert (text, tokens, offsets) == (output.text, output.token_ids, output.text_offsets or [])
        assert [ours.token for ours in logprobs] == [theirs.token for theirs in output.logprobs or []]
        assert (prompt is None) == (output.prompt_logprobs is None)
        for ours, theirs in zip([*logprobs, *(prompt or [])], [*(output.logprobs or []), *(output.prompt_logprobs or [])], strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert (ours.token, ours.rank, len(ours.top)) == (theirs.token, theirs.rank, len(theirs.top))
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
