"""Compares what Chairlift computes of a model with what a reference computes."""

from __future__ import annotations

import dataclasses
import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from chairlift.engine.llm import LLM
from chairlift.models.encoder import EncoderConfig
from chairlift.outputs import TokenLogprobs
from chairlift.sampling import EMBED, SamplingParams
from chairlift.verification.reference import Choices, Reference

TIE = 1e-4
"""Two tokens whose log-probabilities differ by less than this, in both programs, may come in either order."""
TOLERANCE = 1e-3
"""The largest difference of a log-probability that different orders of sums explain, for one of 1 and below; larger ones in proportion."""
TOP = 20
"""The most likely tokens whose log-probabilities are compared."""
ANSWER = 96
"""Most tokens of an answer."""
COMPANY = 16
"""Sequences that are computed together."""
CHUNK = 64
"""Tokens of a step, so that longer prompts are computed in chunks."""

_SENTENCES = "The chairlift carries skiers up the mountain, past the trees and over the valley, while the snow falls on the village below. "
PROMPTS = (
    "Once upon a time, in a village by the sea, there lived",
    'def fibonacci(n):\n    """Returns the n-th Fibonacci number."""\n    if n < 2:\n',
    _SENTENCES * 6,
)
TEXTS = (
    *PROMPTS,
    "Hello world",
    "  two spaces,\ttabs\t\tand\n\n\nlines  ",
    "3.14159 + 1234567890 = 0x1F, 50%",
    "I'm, you're, WE'LL, don't; l'été, naïve",
    "Ünïcödé, ελληνικά, русский, العربية, हिन्दी, 中文字符, 日本語, 한국어",
    "👩‍🚀🏔️🚡 emoji and e\u0301 combining",
    "https://example.org/a?b=c&d=1#e <tag attr='x'>&amp;</tag>",
    "CamelCaseWords snake_case_words SCREAMING and x1y2z3",
)
CONVERSATION = [{"role": "user", "content": "How do skiers get up a mountain?"}]
DOCUMENTS = ("A chairlift carries skiers up a mountain.", "Bread needs yeast, water, flour and salt.", "Snow")


@dataclass(slots=True)
class Findings:
    """What was compared: `facts` are lines of a name and a text, `differences` say what is not equal."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def note(self, name: str, text: str) -> None:
        """Adds a fact."""
        self.facts.append((name, text))

    def text(self) -> str:
        """The report, in lines."""
        lines = [("chairlift verify", "DIFFERENT" if self.differences else "equal"), *self.facts]
        width = max(len(name) for name, _ in lines)
        return "\n".join([f"{name:{width}}  {text}" for name, text in lines] + [f"DIFFERS: {text}" for text in self.differences])


def compare_texts(llm: LLM, reference: Reference, findings: Findings) -> None:
    """Compares the tokens of texts and of a conversation."""
    equal, texts = 0, [text for text in TEXTS if reference.reads_marks or not any(map(unicodedata.combining, text))]
    for text in texts:
        ours, theirs = llm.tokenizer.encode(text), reference.encode(text)
        equal += ours == theirs
        if ours != theirs:
            findings.differences.append(f"tokens of {text!r:.60}: {_apart(ours, theirs)}")
    left_out = f"; {len(TEXTS) - len(texts)} with combining marks left out" if len(texts) < len(TEXTS) else ""
    findings.note("texts", f"{equal} of {len(texts)} have equal tokens{left_out}")
    if llm.tokenizer.template_source is None:  # llama.cpp then has a template of its own
        findings.note("chat", "no chat template")
        return
    theirs_of_chat = reference.chat(CONVERSATION)
    if theirs_of_chat is None:
        findings.differences.append("there is a chat template, and none in the reference")
        return
    ours_of_chat = llm.tokenizer.chat(CONVERSATION)
    findings.note("chat", f"{len(ours_of_chat)} tokens, {'equal' if ours_of_chat == theirs_of_chat else 'not equal'}")
    if ours_of_chat != theirs_of_chat:
        findings.differences.append(f"tokens of a conversation: {_apart(ours_of_chat, theirs_of_chat)}")


def compare_answers(llm: LLM, reference: Reference, findings: Findings) -> None:
    """Compares greedy answers and the log-probabilities of their tokens, and answers alone with those in company."""
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    if llm.tokenizer.template_source is not None:
        prompts.append(llm.tokenizer.chat(CONVERSATION))
    context = llm.info.max_model_len
    prompts = [prompt[: context // 2] for prompt in prompts if prompt]
    params = [
        SamplingParams(max_tokens=min(ANSWER, context - len(prompt)), temperature=0.0, ignore_eos=True, logprobs=TOP) for prompt in prompts
    ]
    alone = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    company = [index % len(prompts) for index in range(max(COMPANY, len(prompts)))]
    together = llm.generate([prompts[index] for index in company], [params[index] for index in company])
    same = all(
        (output.token_ids, output.logprobs) == (alone[index].token_ids, alone[index].logprobs)
        for index, output in zip(company, together, strict=True)
    )
    findings.note("batch", f"answers alone and among {len(company)} are {'equal in every bit' if same else 'not equal'}")
    if not same and llm.info.determinism == "batch-invariant":
        findings.differences.append("answers depend on the requests that are computed with them")
    total, ties, largest = 0, 0, 0.0
    for number, (prompt, output) in enumerate(zip(prompts, alone, strict=True), 1):
        theirs = reference.follow(prompt, output.token_ids, TOP)
        result = follow(output.logprobs or [], theirs, lambda token: repr(llm.tokenizer.decode([token], skip_special_tokens=False)))
        total, ties, largest = total + len(theirs), ties + result.ties, max(largest, result.largest)
        findings.differences += [f"answer {number}, {text}" for text in result.differences]
    apart = f"the largest difference of a log-probability is {largest:.1e}"
    findings.note("answers", f"{total} tokens of {len(prompts)} greedy answers compared, {ties} ties; {apart}")
    if total == 0:
        findings.differences.append("the reference computed no token")


@dataclass(slots=True)
class Followed:
    """What was found along an answer."""

    ties: int = 0
    largest: float = 0.0
    differences: list[str] = field(default_factory=list)


def follow(ours: Sequence[TokenLogprobs], theirs: Sequence[Choices], name: Callable[[int], str]) -> Followed:
    """Compares an answer with a reference's choices after the same tokens. The first difference of each kind is reported."""
    result = Followed()
    token_differs = logprob_differs = False
    for at, (mine, choices) in enumerate(zip(ours, theirs, strict=False), 1):
        here, there = dict(mine.top), dict(choices)
        known = [token for token in here.keys() & there.keys() if not math.isnan(there[token])]
        unequal = [
            (math.inf if math.isnan(here[token]) else abs(here[token] - there[token]) / max(1.0, abs(there[token])), token)
            for token in known
        ]
        apart, worst = max(unequal, default=(0.0, mine.token))
        result.largest = max(result.largest, apart)
        other = choices[0][0]
        if other != mine.token:
            gaps = [mine.logprob - here.get(other, -math.inf), choices[0][1] - there.get(mine.token, -math.inf)]
            if not any(gap >= TIE for gap in gaps):
                result.ties += 1
            elif not token_differs:
                token_differs = True
                result.differences.append(
                    f"token {at}: {mine.token} {name(mine.token)}, and {other} {name(other)} in the reference; the two log-probabilities "
                    f"are {gaps[0]:.2g} apart here and {gaps[1]:.2g} there"
                )
        if apart > TOLERANCE and not logprob_differs:
            logprob_differs = True
            result.differences.append(
                f"token {at}: the log-probability of {worst} {name(worst)} is {here[worst]:.6g}, and {there[worst]:.6g} in the reference"
            )
    return result


def compare_embeddings(llm: LLM, reference: Reference, encoder: EncoderConfig | None, findings: Findings) -> None:
    """Compares embeddings of texts, and texts alone with texts in company."""
    how = (encoder.pooling, encoder.dense) if encoder else ("last", ())
    limit = llm.info.max_text_len or 0
    texts = [ids for text in TEXTS if 0 < len(ids := llm.tokenizer.encode(text)) <= limit]
    ours = llm.embed(texts)
    alone = np.concatenate([llm.embed([ids]) for ids in texts])
    same = np.array_equal(ours, alone)
    findings.note("batch", f"embeddings alone and among {len(texts)} are {'equal in every bit' if same else 'not equal'}")
    if not same:
        findings.differences.append("embeddings depend on the texts that are computed with them")
    largest = 0.0
    for ids, embedding in zip(texts, ours, strict=True):
        theirs = np.array(reference.embed(ids, *how), dtype=np.float32)
        if theirs.shape != embedding.shape:
            findings.differences.append(f"embeddings have {len(embedding)} numbers, and {len(theirs)} in the reference")
            return
        ours_of_length_1 = embedding / np.linalg.norm(embedding)
        largest = float(np.maximum(largest, np.abs(theirs - ours_of_length_1).max()))  # NaN stays
    findings.note("embeddings", f"{len(texts)} texts; the largest difference of a number is {largest:.1e}")
    if not largest <= reference.embedding_tolerance:
        findings.differences.append(f"embeddings differ by up to {largest:.1e}, more than {reference.embedding_tolerance:.0e}")


def compare_scores(llm: LLM, reference: Reference, findings: Findings) -> None:
    """Compares a classifier's numbers, before the sigmoid, for pairs of texts."""
    query, largest = CONVERSATION[0]["content"], 0.0
    for document in DOCUMENTS:
        ids, second = llm.tokenizer.encode_pair(query, document)
        theirs = reference.encode_pair(query, document)
        if theirs is not None and theirs != ids:
            findings.differences.append(f"tokens of a pair with {document!r:.60}: {_apart(ids, theirs)}")
        embedding = llm.generate([ids], dataclasses.replace(EMBED, second_text=second))[0].embedding
        number = embedding[0] if embedding else float("nan")
        largest = float(np.maximum(largest, abs(number - reference.score(query, document))))  # NaN stays
    findings.note("scores", f"{len(DOCUMENTS)} pairs of texts; the largest difference before the sigmoid is {largest:.1e}")
    if not largest <= 10 * reference.embedding_tolerance:
        findings.differences.append(f"scores differ by up to {largest:.1e}")


def _apart(ours: list[int], theirs: list[int]) -> str:
    """Describes where two lists of tokens differ first."""
    at = next((at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), min(len(ours), len(theirs)))
    return f"from token {at + 1} on {ours[at : at + 8]}, and {theirs[at : at + 8]} in the reference"
