"""The formats in which models write tool calls, with a parser for each."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Generator
from typing import ClassVar

from chairlift.chat.tools.hermes import HERMES_OPEN, Hermes
from chairlift.chat.tools.literals import GEMMA_OPEN, OLMO_OPEN, PYTHONIC_LIST, PYTHONIC_MARKS, Gemma, Olmo, Pythonic
from chairlift.chat.tools.named import Functionary31, Functionary32, Glm4
from chairlift.chat.tools.parser import MAX_HEAD, InvalidCall, ParserSteps, ToolCallDelta, ToolParser
from chairlift.chat.tools.tagged import (
    DSML,
    GLM_KEY,
    MINIMAX_OPEN,
    QWEN_PARAMETER,
    SEED_OPEN,
    DeepSeek4,
    DeepSeek32,
    Glm,
    MiniMax,
    Qwen,
    Seed,
)
from chairlift.grammar.source import ToolCallFormat

GRANITE_OPEN, GRANITE_CLOSE = "<|tool_call|>", "<|/tool_call|>"
NEMOTRON_OPEN, NEMOTRON_CLOSE = "<TOOLCALL>", "</TOOLCALL>"
COHERE_OPEN, COHERE_CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
COMMAND_R_OPEN, COMMAND_R_CLOSE = "Action:", "```"
APERTUS_OPEN, APERTUS_CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"
INTERN_OPEN, INTERN_PLUGIN, INTERN_CLOSE = "<|action_start|>", "<|plugin|>", "<|action_end|>"
HUNYUAN_OPEN, HUNYUAN_CLOSE = "<tool_calls>", "</tool_calls>"
LLAMA_TAG = "<|python_tag|>"
MISTRAL_MARK, MISTRAL_CALL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
DEEPSEEK_BEGIN, DEEPSEEK_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
DEEPSEEK_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
START, CHANNEL, MESSAGE, HARMONY_CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"

_KIMI_ID = re.compile(r"^(?:functions\.)?(.*?)(?::[0-9]+)?$")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class Granite(Hermes):
    """`<|tool_call|>[{"name": "f", "arguments": {}}]`: the format of Granite 3 and Phi-4, which may end with `<|/tool_call|>`."""

    marks = (GRANITE_OPEN, HERMES_OPEN, GRANITE_CLOSE)
    form = ToolCallFormat(f"{GRANITE_OPEN}[", separator=", ", end="]")


class Nemotron(Hermes):
    """`<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>`: the format of Nemotron Nano 2 and Llama Nemotron."""

    marks = (NEMOTRON_OPEN, NEMOTRON_CLOSE)
    form = ToolCallFormat(f"{NEMOTRON_OPEN}[", separator=", ", end=f"]{NEMOTRON_CLOSE}")


class Cohere(Hermes):
    """`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]<|END_ACTION|>`: that of Command R7B and Command A."""

    marks = (COHERE_OPEN, COHERE_CLOSE)
    form = ToolCallFormat(
        f"{COHERE_OPEN}[", '{"tool_call_id": "0", "tool_name": "', '", "parameters": ', separator=", ", end=f"]{COHERE_CLOSE}"
    )


class CommandR(Hermes):
    """`Action:` and a block of code with `[{"tool_name": "f", "parameters": {}}]`: the format of Command R and R+."""

    marks = (COMMAND_R_OPEN, COMMAND_R_CLOSE)
    form = ToolCallFormat(
        f"{COMMAND_R_OPEN}\n```json\n[\n    ",
        '{\n        "tool_name": "',
        '",\n        "parameters": ',
        "\n    }",
        ",\n    ",
        f"\n]{COMMAND_R_CLOSE}",
    )

    def _call(self) -> ParserSteps:
        yield from self._skip_space()
        yield from self._expect_one_of(f"{COMMAND_R_CLOSE}json")
        yield from self._objects()


class Apertus(Hermes):
    """`<|tools_prefix|>[{"f": {}}]<|tools_suffix|>`: the format of Apertus, in which a function's name is the key of its arguments."""

    marks = (APERTUS_OPEN, APERTUS_CLOSE)
    form = ToolCallFormat(f"{APERTUS_OPEN}[", '{"', '": ', "}", ", ", f"]{APERTUS_CLOSE}")

    def _object(self) -> ParserSteps:
        yield from self._expect("{")
        name = json.loads((yield from self._value('"')))
        yield from self._expect(":")
        if name not in self._names or (yield from self._skip_space()) != "{":
            raise InvalidCall
        yield from self._arguments(name)
        if (yield from self._skip_space()) == "}":
            self._take()
        self._raw.clear()


class Intern(Hermes):
    """`<|action_start|><|plugin|>{"name": "f", "parameters": {}}<|action_end|>`: the format of InternLM2 and Intern-S1."""

    marks = (INTERN_OPEN, INTERN_CLOSE)
    inner_marks = (INTERN_PLUGIN,)
    form = ToolCallFormat(
        f"{INTERN_OPEN}{INTERN_PLUGIN}\n",
        between='", "parameters": ',
        separator=f"{INTERN_CLOSE}\n{INTERN_OPEN}{INTERN_PLUGIN}\n",
        end=INTERN_CLOSE,
    )

    def _call(self) -> ParserSteps:
        yield from self._skip_space()
        yield from self._expect_one_of(INTERN_PLUGIN)
        yield from super()._call()


class Hunyuan(Hermes):
    """`<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>`: the format of Hunyuan, Apriel and Jamba.

    MiniMax-M1 writes each call on a line of its own instead of a list.
    """

    marks = (HUNYUAN_OPEN, HUNYUAN_CLOSE)
    form = ToolCallFormat(f"{HUNYUAN_OPEN}[", separator=", ", end=f"]{HUNYUAN_CLOSE}")

    def _call(self) -> ParserSteps:
        yield from self._objects()
        while (yield from self._skip_space()) == "{":
            yield from self._object()


class Llama(ToolParser):
    """`{"name": "f", "parameters": {}}` as the whole answer or after `<|python_tag|>`, with `;` between calls: the format of Llama 3.

    Without the tag, only an answer that begins with a call contains calls. Also accepts a list of calls, as xLAM writes it.
    """

    marks = (LLAMA_TAG,)

    @classmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """Omits the tag, which Llama uses for its built-in functions."""
        return ToolCallFormat(between='", "parameters": ', separator="; ")

    def _parse(self) -> ParserSteps:
        if (yield from self._skip_space()) in ("{", "["):
            yield from self._attempt(self._call_list())
        else:
            self._emit_content("".join(self._raw))
        while (yield from self._content()):
            yield from self._attempt(self._call_list())

    def _call_list(self) -> ParserSteps:
        yield from self._objects()
        while (yield from self._skip_space(";")) == "{":
            yield from self._object()
        if (yield from self._peek()):
            raise InvalidCall


class Mistral(ToolParser):
    """`[TOOL_CALLS][{"name": "f", "arguments": {}}]` or `[TOOL_CALLS]f[ARGS]{}`, once for each call: Mistral's older and newer format.

    The model's own call id between name and arguments is dropped.
    """

    marks = (MISTRAL_MARK,)
    inner_marks = (MISTRAL_CALL_ID, MISTRAL_ARGS)

    @classmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """The newer format if the template uses it."""
        if MISTRAL_ARGS in template:
            return ToolCallFormat(MISTRAL_MARK, before="", between=MISTRAL_ARGS, after="", separator=MISTRAL_MARK)
        return ToolCallFormat(f"{MISTRAL_MARK}[", separator=", ", end="]")

    @staticmethod
    def new_id() -> str:
        """Returns a call id. Mistral's templates accept only ids of nine letters and digits."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _parse(self) -> ParserSteps:
        while (yield from self._content()):
            yield from self._attempt(self._after_mark())

    def _after_mark(self) -> ParserSteps:
        if (yield from self._skip_space()) in ("[", "{"):
            yield from self._objects()
            return
        head = ""
        while not head.endswith(MISTRAL_ARGS) and (character := (yield from self._peek())) != "{":
            if not character or len(head) == MAX_HEAD:
                raise InvalidCall
            head += character
            self._take()
        name = head.removesuffix(MISTRAL_ARGS).partition(MISTRAL_CALL_ID)[0].strip()
        if name not in self._names or (yield from self._skip_space()) != "{":
            raise InvalidCall
        yield from self._arguments(name)


class DeepSeek(ToolParser):
    """DeepSeek's format: calls between `tool_calls_begin` and `tool_calls_end`, each with its name before its arguments.

    DeepSeek V3 and R1 write the type, `tool_sep`, the name, and the arguments as a code block; V3.1 the name, `tool_sep` and the arguments.
    Some models forget `tool_calls_begin`.
    """

    marks: ClassVar[tuple[str, ...]] = (DEEPSEEK_BEGIN, DEEPSEEK_CALL)
    end_mark = DEEPSEEK_CALL_END
    inner_marks: ClassVar[tuple[str, ...]] = (DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END, DEEPSEEK_END)

    @classmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """The older format if the template uses code blocks."""
        if "```json" in template:
            before, between, after = f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}", "\n```json\n", f"\n```{DEEPSEEK_CALL_END}"
            return ToolCallFormat(DEEPSEEK_BEGIN, before, between, after, "\n", DEEPSEEK_END)
        return ToolCallFormat(DEEPSEEK_BEGIN, DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END, "", DEEPSEEK_END)

    def _parse(self) -> ParserSteps:
        while (yield from self._content()):
            yield from self._attempt(self._call_list())

    def _call_list(self) -> ParserSteps:
        call, separator, call_end, end = self.inner_marks
        if self._raw != [call]:
            yield from self._skip_space()
            yield from self._expect_one_of(call)
        while True:
            name = yield from self._call_name((yield from self._text_until(separator, MAX_HEAD)).strip())
            if name not in self._names or (yield from self._skip_space()) != "{":
                raise InvalidCall
            yield from self._attempt(self._arguments(name))
            yield from self._skip_space("`")
            self._raw.clear()
            yield from self._expect_one_of(call_end)
            yield from self._skip_space()
            self._raw.clear()
            if (yield from self._expect_one_of(call, end)) == end:
                return

    def _call_name(self, head: str) -> Generator[None, None, str]:
        """Returns the function of a call with this text before its separator."""
        if head != "function" or (yield from self._skip_space()) == "{":
            return head
        name = yield from self._text_until("\n", MAX_HEAD)
        yield from self._expect_one_of("```json")
        return name.strip()


class Kimi(DeepSeek):
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>` in a section: the format of Kimi K2.

    The text before the arguments is the call's id, in which the conversation later tells the model the function.
    """

    marks = (KIMI_BEGIN, KIMI_CALL)
    end_mark = KIMI_CALL_END
    inner_marks = (KIMI_CALL, KIMI_SEPARATOR, KIMI_CALL_END, KIMI_END)
    _id = ""
    _ids: frozenset[str] = frozenset()

    @classmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """Forced calls all have number 0, because a grammar cannot count."""
        return ToolCallFormat(KIMI_BEGIN, f"{KIMI_CALL}functions.", f":0{KIMI_SEPARATOR}", KIMI_CALL_END, "", KIMI_END)

    def _call_name(self, head: str) -> Generator[None, None, str]:
        self._id = head
        yield from ()
        return _KIMI_ID.sub(r"\1", head)

    def _begin_call(self, name: str) -> None:
        super()._begin_call(name)
        if self._id not in self._ids:
            self._ids |= {self._id}
            self._output[-1] = ToolCallDelta(self._calls - 1, id=self._id, name=name)


class Harmony(ToolParser):
    """`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>`: the format of gpt-oss.

    Messages on a channel without a recipient are content. The reasoning parser takes those on the channel `analysis`.
    """

    marks = (START, CHANNEL, MESSAGE, "<|end|>", HARMONY_CALL, "<|return|>")
    end_mark = HARMONY_CALL
    inner_marks = ("<|constrain|>",)
    wraps_content = True

    @classmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """Calls on the channel `commentary`, content on `final`."""
        begin = f"{CHANNEL}commentary to=functions."
        between, separator = f" <|constrain|>json{MESSAGE}", f"<|end|>{START}assistant{begin}"
        return ToolCallFormat(begin, "", between, "", separator, content=f"{CHANNEL}final{MESSAGE}")

    def _parse(self) -> ParserSteps:
        # The prompt ends with the role, which the recipient may follow.
        yield from self._skip_space()
        try:
            begin = yield from self._expect_one_of("to=functions.")
        except InvalidCall:
            self._emit_content("".join(self._raw))
        else:
            yield from self._message(begin)
        while mark := (yield from self._content()):
            if mark in (START, CHANNEL):
                yield from self._message()

    def _message(self, begin: str = "") -> ParserSteps:
        """Parses a message's head after its text `begin`, and its arguments if it is a call. An unfinished head is dropped."""
        try:
            head = begin + (yield from self._text_until(MESSAGE, MAX_HEAD))
        except InvalidCall:
            return
        recipient = _RECIPIENT.search(head)
        if recipient is not None and recipient[1] in self._names:
            match (yield from self._skip_space()):
                case "{":
                    yield from self._attempt(self._arguments(recipient[1]))
                case "":  # a function without arguments
                    self._whole_call(recipient[1], "{}")
        self._raw.clear()


TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "apertus": Apertus,
    "cohere": Cohere,
    "command_r": CommandR,
    "deepseek": DeepSeek,
    "deepseek_v32": DeepSeek32,
    "deepseek_v4": DeepSeek4,
    "functionary_v3.1": Functionary31,
    "functionary_v3.2": Functionary32,
    "gemma": Gemma,
    "glm": Glm,
    "glm4_0414": Glm4,
    "granite": Granite,
    "hermes": Hermes,
    "hunyuan": Hunyuan,
    "internlm": Intern,
    "kimi_k2": Kimi,
    "llama": Llama,
    "minimax_m2": MiniMax,
    "mistral": Mistral,
    "nemotron": Nemotron,
    "olmo3": Olmo,
    "openai": Harmony,
    "pythonic": Pythonic,
    "qwen3_coder": Qwen,
    "seed_oss": Seed,
}
"""Parsers by name; `openai` is that of gpt-oss and `qwen3_coder` that of Qwen3.5 too, as in vLLM."""

_TEMPLATE_MARKS = (
    ("openai", (f"{CHANNEL}commentary",)),
    ("deepseek", (DEEPSEEK_BEGIN,)),
    ("deepseek_v4", (f"{DSML}tool_calls>", "dsml_token }}tool_calls>")),
    ("deepseek_v32", (DSML,)),
    ("gemma", GEMMA_OPEN),
    ("granite", (GRANITE_OPEN,)),
    ("mistral", (MISTRAL_MARK,)),
    ("pythonic", ("[func_name1(", *PYTHONIC_MARKS)),
    ("nemotron", (NEMOTRON_OPEN,)),
    ("cohere", (COHERE_OPEN,)),
    ("command_r", ("`directly-answer`",)),
    ("apertus", (APERTUS_OPEN,)),
    ("internlm", (INTERN_OPEN,)),
    ("kimi_k2", (KIMI_BEGIN,)),
    ("minimax_m2", (MINIMAX_OPEN,)),
    ("olmo3", (OLMO_OPEN,)),
    ("seed_oss", (SEED_OPEN,)),
    ("hunyuan", (HUNYUAN_OPEN,)),
    ("qwen3_coder", (QWEN_PARAMETER,)),
    ("glm", (GLM_KEY,)),
    ("functionary_v3.1", ("<{start_tag}={function_name}>",)),
    ("functionary_v3.2", (">>>${recipient}",)),
    ("hermes", (HERMES_OPEN,)),
    ("glm4_0414", ("<|assistant|>{{ meta }}",)),
    ("llama", (LLAMA_TAG, "ipython")),
    ("pythonic", (PYTHONIC_LIST,)),
)
"""Texts in a chat template of which each identifies its format; the first format that fits counts."""


def parser_for_template(template: str) -> type[ToolParser]:
    """Returns the parser for a model with this chat template; Hermes if the template does not tell."""
    return next((TOOL_PARSERS[name] for name, marks in _TEMPLATE_MARKS if any(mark in template for mark in marks)), Hermes)
