"""Sampling parameters of a request: how tokens are chosen and when to stop."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, replace
from typing import Any, NamedTuple, cast

from chairlift.checks import integer, number, text
from chairlift.errors import InvalidRequest, did_you_mean

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 64
MAX_SEQUENCES = 128
MAX_LOGPROBS = 20
MAX_BIASED = 1024
MAX_BAD_WORDS, MAX_BAD_TEXT = 128, 4096
"""Texts that are never completed, and their characters together: each sequence of a request looks for them in each step."""
MAX_WORD_TOKENS = 5 * MAX_STOP_LENGTH
"""A character has up to four bytes, and a token has at least one byte, except a token at the beginning of a text."""
MAX_END_TOKENS = 64
"""Maximum tokens of the mark that ends reasoning."""
LEAST_TOP_P = 1e-9
"""What a `top_p` of 0, which other programs allow, stands for: only the likeliest token is left."""
MAX_GRAMMAR = 65_536
"""Maximum characters of a schema, regular expression, list of choices or grammar."""

JSON_STRUCTURES = ("json", "json_object")
STRUCTURES = (*JSON_STRUCTURES, "regex", "choice", "grammar")
JSON_SCHEMA = """
$schema $id $ref $anchor $dynamicRef $dynamicAnchor $vocabulary $comment $defs definitions type enum const default title description
examples deprecated readOnly writeOnly format allOf anyOf oneOf not if then else properties patternProperties additionalProperties
propertyNames required minProperties maxProperties dependentRequired dependentSchemas dependencies unevaluatedProperties items
prefixItems additionalItems unevaluatedItems contains minContains maxContains minItems maxItems uniqueItems minLength maxLength
pattern minimum maximum exclusiveMinimum exclusiveMaximum multipleOf contentEncoding contentMediaType contentSchema
"""
"""The keywords of JSON Schema."""


class DefaultMaxTokens(int):
    """The value of `SamplingParams.max_tokens` if the caller gives none. A chat then fills the context instead."""


DEFAULT_MAX_TOKENS = DefaultMaxTokens(16)


class ReasoningBudget(NamedTuple):
    """The maximum number of reasoning tokens at the beginning of an output, and the marks of the reasoning."""

    tokens: int
    start: str
    """Text that begins the reasoning. Empty: it has begun."""
    end: str
    end_tokens: tuple[int, ...]
    """What follows the last allowed token: `end`, and the text after it that the format requires."""
    again: str = ""
    """Text with which the reasoning may begin again after its end. Empty: it may not."""


class StructuredOutput(NamedTuple):
    """The form that an answer must have.

    The kinds are `json` (a JSON schema), `json_object` (any object, no text), `regex`, `choice` (a JSON list of strings) and `grammar`
    (Lark, as llguidance reads it).
    """

    kind: str
    text: str = ""
    param: str = "structured_outputs"
    """The request field that it comes from, for error messages."""
    before: str = ""
    """Lark rules for text before the answer, such as reasoning; their `start` refers to the answer as `@answer`. Empty: no such text."""
    budget: ReasoningBudget | None = None
    """The limit of the reasoning before the answer."""
    disable_any_whitespace: bool | None = None
    """Whether an answer of a JSON kind has no whitespace between its tokens. None: none, unless its schema says otherwise."""


def _check_structure(structure: StructuredOutput) -> None:
    """Raises InvalidRequest for a wrong kind, option or length."""
    if structure.kind not in STRUCTURES:
        message = f"structured_output must be one of {', '.join(STRUCTURES)}, got {structure.kind!r:.100}"
        raise InvalidRequest(message, param="structured_outputs")
    if not isinstance(structure.disable_any_whitespace, bool | None):
        message = f"disable_any_whitespace must be true or false, got {structure.disable_any_whitespace!r:.100}"
        raise InvalidRequest(message, param=structure.param)
    if structure.disable_any_whitespace and structure.kind not in JSON_STRUCTURES:
        raise InvalidRequest(f"disable_any_whitespace needs {' or '.join(JSON_STRUCTURES)}", param=structure.param)
    text(structure.param, structure.text, 0, MAX_GRAMMAR)
    text(structure.param, structure.before, 0, MAX_GRAMMAR)


def _structured_by(given: Mapping[str, Any]) -> StructuredOutput:
    """The structure of a dict: vLLM's {"regex": ...}, or a JSON schema. Raises InvalidRequest for a dict that is neither."""
    options = dict(given)
    compact = options.pop("disable_any_whitespace", None)
    kinds = [kind for kind in STRUCTURES if kind in options]
    if len(options) == 1 and kinds:
        return StructuredOutput(kinds[0], options[kinds[0]], disable_any_whitespace=compact)
    if given and (kinds or not options.keys() & set(JSON_SCHEMA.split())):
        names = ", ".join(map(repr, options))
        hint = next(filter(None, (did_you_mean(str(name), STRUCTURES) for name in options if name not in kinds)), "")
        message = f"structured_output must be a JSON schema or have just one of {', '.join(STRUCTURES)}, got {names:.100}{hint}"
        raise InvalidRequest(message, param="structured_outputs")
    return StructuredOutput("json", cast("str", options), disable_any_whitespace=compact)


def structured(given: Any) -> StructuredOutput:
    """Converts a caller's value to a `StructuredOutput`: one, vLLM's {"regex": ...}, or a JSON schema as a dict or pydantic model.

    Schemas and choices may be Python values, which are converted to JSON. Raises InvalidRequest for anything else.
    """
    value = given
    if hasattr(value, "model_json_schema"):
        value = ("json", value)
    elif isinstance(value, Mapping):
        value = _structured_by(value)
    if not isinstance(value, tuple | list) or not 1 <= len(value) <= len(StructuredOutput._fields):
        raise InvalidRequest(
            f"structured_output must be a StructuredOutput, a JSON schema as a dict, or a dict of one of {', '.join(STRUCTURES)}, "
            f"got {given!r:.100}",
            param="structured_outputs",
        )
    structure = StructuredOutput(*value)
    if structure.budget is not None:
        budget = ReasoningBudget(*structure.budget)
        integer("thinking_token_budget", budget.tokens, 0, 2**31 - 1)
        structure = structure._replace(budget=budget._replace(end_tokens=_tokens("end_tokens", budget.end_tokens, MAX_END_TOKENS)))
    form: Any = structure.text.model_json_schema() if hasattr(structure.text, "model_json_schema") else structure.text
    if structure.kind == "json_object":
        form = ""
    elif (structure.kind == "json" and isinstance(form, Mapping)) or (structure.kind == "choice" and isinstance(form, list | tuple)):
        try:
            form = json.dumps(form, ensure_ascii=False)
        except TypeError as error:
            raise InvalidRequest(f"structured_output is not JSON: {error}", param=structure.param) from None
    return structure._replace(text=form)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling parameters, applied in the order penalties, temperature, top-k, top-p, min-p.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `max_tokens` None means as many as the context allows, which is also the
    default of a chat. With a `seed`, draws depend only on (seed, position), whatever else is in the batch. The generated text ends before
    the first occurrence of a string of `stop`; a token of `stop_token_ids` also ends it. `n` answers are returned. With `best_of` > `n`,
    that many are drawn, and the `n` with the highest mean log-probability of their tokens are kept.

    Until `min_tokens` tokens are generated, the model cannot end the answer, and stop strings are not matched. `logit_bias` is added to
    logits by token id, before all other changes. Only `allowed_token_ids` can be drawn, if given. `bad_words` (text or token ids) are never
    completed in the tokens in which the tokenizer writes them, with and without a space before. `structured_output` constrains the answer's
    form; `structured_outputs` is vLLM's name for it. `logprobs` requests the log-probability of each output token and of this many most
    likely alternatives, at temperature 1 and before all changes above. `prompt_logprobs` requests the same for the prompt, which is then
    computed whole, regardless of the cache. `include_stop_str_in_output` includes the stop string or token in the text,
    `skip_special_tokens=False` control tokens. `embed` asks for the prompt's embedding, or a classifier's number, instead of a text; in a
    pair of texts `second_text` is the index of the second's first token. `lora` is the name of the LoRA adapter that computes the request.
    """

    max_tokens: int | None = DEFAULT_MAX_TOKENS
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    structured_output: StructuredOutput | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    embed: bool = False
    second_text: int | None = None
    lora: str | None = None
    structured_outputs: InitVar[StructuredOutput | Mapping[str, Any] | None] = None

    def __post_init__(self, structured_outputs: StructuredOutput | Mapping[str, Any] | None) -> None:
        """Raises InvalidRequest with the field and its allowed values."""
        if structured_outputs is not None:
            if self.structured_output is not None:
                raise InvalidRequest("structured_output and structured_outputs are the same: give one", param="structured_outputs")
            self._set("structured_output", structured_outputs)
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        self._check_draws()
        self._check_answers()
        self._check_allowed()
        self._check_results()

    def _check_draws(self) -> None:
        """Checks how a token is drawn."""
        number("temperature", self.temperature, 0.0, 100.0)
        if isinstance(self.top_k, int) and self.top_k == -1:  # both -1 and 0 are in use for "off"
            self._set("top_k", 0)
        integer("top_k", self.top_k, 0, 2**31 - 1)
        number("top_p", self.top_p, 0.0, 1.0, above=True)
        number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            integer("seed", self.seed, -(2**63), 2**63 - 1)
        # A smaller penalty could make finite logits infinite.
        number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)

    def _check_answers(self) -> None:
        """Checks the number of answers, and where they end."""
        self._set("stop", _strings("stop", self.stop, MAX_STOP_STRINGS))
        self._set("stop_token_ids", _tokens("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS))
        integer("n", self.n, 1, MAX_SEQUENCES)
        if self.best_of is not None:
            integer("best_of", self.best_of, self.n, MAX_SEQUENCES)
        integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})", param="min_tokens")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "embed"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be True or False, got {getattr(self, name)!r:.100}", param=name)

    def _check_allowed(self) -> None:
        """Checks which tokens may come."""
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise InvalidRequest(f"logit_bias must be a dict of numbers by token id, got {self.logit_bias!r:.100}", param="logit_bias")
            self._set("logit_bias", dict(self.logit_bias))
            _at_most("logit_bias", len(self.logit_bias), MAX_BIASED)
            for token, bias in self.logit_bias.items():
                integer("logit_bias", token, 0, 2**31 - 1)
                number("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _tokens("allowed_token_ids", self.allowed_token_ids, MAX_BIASED))
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids is empty: nothing could be drawn", param="allowed_token_ids")
        self._set("bad_words", _words("bad_words", self.bad_words))
        if self.structured_output is not None:
            structure = structured(self.structured_output)
            _check_structure(structure)
            if self.ignore_eos or self.min_tokens:
                conflict = "ignore_eos" if self.ignore_eos else "min_tokens"
                message = f"{conflict} cannot be combined with {structure.param}, which says where the answer ends: leave one out"
                raise InvalidRequest(message, param=conflict)
            self._set("structured_output", structure)

    def _check_results(self) -> None:
        """Checks what is returned beside tokens, and what computes it."""
        if self.logprobs is not None:
            integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.lora is not None:
            text("lora", self.lora, 1, 256)
            if self.embed:
                raise InvalidRequest("embeddings are computed without adapters", param="lora")
        if self.second_text is not None:
            integer("second_text", self.second_text, 0, 2**31 - 1)
        if self.embed:
            self._set("max_tokens", 1)  # the core gives room for a token, though there is none
            logged = (self.logprobs, self.prompt_logprobs, self.structured_output) != (None, None, None)
            if logged or self.num_sequences > 1:
                raise InvalidRequest("an embedding is one result without log-probabilities and structure", param="embed")

    def for_chat(self) -> SamplingParams:
        """Returns the parameters of a chat: without a given `max_tokens` its answer fills the context."""
        return replace(self, max_tokens=None) if isinstance(self.max_tokens, DefaultMaxTokens) else self

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on the previous tokens through penalties."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def verifiable(self) -> bool:
        """Whether several tokens can be sampled in one step: each depends on the previous text only through the model and its grammar."""
        bounded = self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens
        return not (self.penalised or bounded or self.ranked or self.logprobs is not None)

    @property
    def num_sequences(self) -> int:
        """Number of answers to draw."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranked(self) -> bool:
        """Whether more answers are drawn than are kept."""
        return self.num_sequences > self.n


def _at_most(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{name} has {count} entries, at most {most} are allowed", param=name)


def _listed(name: str, value: object) -> tuple[Any, ...]:
    """Returns the values of a list; None gives an empty one."""
    if value is not None and not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be a list, got {value!r:.100}", param=name)
    return () if value is None else tuple(value)


def _strings(name: str, value: str | tuple[str, ...], most: int) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else _listed(name, value)
    _at_most(name, len(strings), most)
    for one in strings:
        if not isinstance(one, str) or not 0 < len(one) <= MAX_STOP_LENGTH:
            raise InvalidRequest(f"each {name} must be a string of 1 to {MAX_STOP_LENGTH} characters", param=name)
        text(name, one, 1, MAX_STOP_LENGTH)
    return strings


def check_bad_words(words: tuple[str | tuple[int, ...], ...], suppressed: int = 0) -> None:
    """Raises InvalidRequest for too many words. A text counts as two lists of ids: it becomes them, with and without a space before it.

    As many lists as are `suppressed` do not count: the tokens that the checkpoint suppresses are added to the caller's words.
    """
    lists = sum(not isinstance(word, str) for word in words)
    _at_most("bad_words", len(words) - lists + (max(lists - suppressed, 0) + 1) // 2, MAX_BAD_WORDS)


def _words(name: str, value: str | tuple[str | tuple[int, ...], ...]) -> tuple[str | tuple[int, ...], ...]:
    words = (value,) if isinstance(value, str) else _listed(name, value)
    check_bad_words(words, suppressed=MAX_BAD_WORDS)
    found: list[str | tuple[int, ...]] = []
    for word in words:
        if isinstance(word, str):
            found += _strings(name, word, 1)
        elif isinstance(word, (tuple, list)) and word:
            found.append(_tokens(name, tuple(word), MAX_WORD_TOKENS))
        else:
            raise InvalidRequest(f"each {name} must be text or a list of token ids, got {word!r:.100}", param=name)
    characters = sum(len(word) for word in found if isinstance(word, str))
    ids = sum(len(word) for word in found if not isinstance(word, str))
    if characters > MAX_BAD_TEXT or ids > MAX_BAD_WORDS + MAX_BAD_TEXT * 2 * MAX_WORD_TOKENS // MAX_STOP_LENGTH:
        raise InvalidRequest(f"{name} may have {MAX_BAD_TEXT} characters together, got more: leave some out", param=name)
    return tuple(found)


def _tokens(name: str, value: tuple[int, ...], most: int) -> tuple[int, ...]:
    tokens = _listed(name, value)
    _at_most(name, len(tokens), most)
    if {*map(type, tokens)} != {int} or min(tokens) < 0 or max(tokens) >= 2**31:  # a loop over thousands takes milliseconds
        for token in tokens:
            integer(name, token, 0, 2**31 - 1)
    return tokens


EMBED = SamplingParams(embed=True, max_tokens=1, temperature=0.0, ignore_eos=True)
"""The parameters of a request for an embedding."""
