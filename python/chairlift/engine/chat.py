"""A conversation of a caller in Python: the request that answers it, and the parts of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from chairlift.chat import messages as chat_messages
from chairlift.chat.answer import AnswerParser, ChoiceBuilder
from chairlift.chat.answer_format import AnswerFormat, answer_grammar
from chairlift.chat.functions import Tool, choose
from chairlift.chat.model import ChatModel
from chairlift.chat.user_turn import user_turn_end
from chairlift.errors import InvalidRequest
from chairlift.outputs import RequestOutput
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from chairlift.engine.arguments import ChatOptions, Message
    from chairlift.engine.engine_info import EngineInfo
    from chairlift.tokenizer import Tokenizer

_MESSAGES, _TOOLS = TypeAdapter(list[chat_messages.Message]), TypeAdapter(list[Tool])


class Chat:
    """A conversation as a request: its prompt and its sampling parameters. It also separates the parts of its answers."""

    def __init__(
        self, tokenizer: Tokenizer, info: EngineInfo, messages: Sequence[Message], params: SamplingParams, options: ChatOptions
    ) -> None:
        """Renders the conversation, which blocks. Raises InvalidRequest."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params must be SamplingParams, got {params!r:.50}", param="params")
        model = ChatModel(tokenizer, info.vocab_size)
        tools = _validated(_TOOLS, options.tools or (), "tools")
        functions = [tool.as_function(f"tools[{index}]") for index, tool in enumerate(tools)]
        custom = frozenset(tool.custom.name for tool in tools if tool.custom is not None)
        spec = choose(functions, options.tool_choice, custom=custom)
        conversation = [message.for_template(f"messages[{i}]") for i, message in enumerate(_validated(_MESSAGES, messages, "messages"))]
        if not conversation:
            raise InvalidRequest("a conversation is a list of messages, each with `role` and `content`", param="messages")
        inputs = model.template_inputs(conversation, _variables(options), spec)
        self.prompt = tokenizer.chat(inputs.conversation, **inputs.variables)
        """Token ids."""
        reasoning = model.reasoning_after(self.prompt, conversation[-1] if options.continue_final_message else None)
        self._format = AnswerFormat(model, spec, inputs.parser_type, reasoning, hide=params.skip_special_tokens)
        params = replace(params.for_chat(), structured_output=answer_grammar(self._format, params.structured_output, None, []))
        self.params = replace(params, skip_special_tokens=False) if self._format.control_marks else params
        self._answers: dict[int, tuple[AnswerParser, ChoiceBuilder]] = {}
        self._user_turn_end: int | None = None
        if info.recurrent:
            with suppress(InvalidRequest):  # the template may want more than the messages up to the user's last one
                if (begun := model.inputs_up_to_user(conversation, _variables(options), spec)) is not None:
                    beginning = tokenizer.chat(begun.conversation, **begun.variables)
                    self._user_turn_end = user_turn_end(self.prompt, beginning, tokenizer.eos_token_ids)

    def scheduling(self, given: Scheduling) -> Scheduling:
        """Returns the scheduling parameters. For a model with recurrent layers they say where the user's last turn ends, if it is known."""
        if self._user_turn_end is None or given.user_turn_end is not None:
            return given
        return replace(given, user_turn_end=self._user_turn_end)

    def separate(self, output: RequestOutput) -> RequestOutput:
        """Returns an output, whole or the next increment of its answer, with reasoning and tool calls apart from its text."""
        if output.index not in self._answers:
            self._answers[output.index] = AnswerParser(output.index, self._format), ChoiceBuilder()
        parser, builder = self._answers[output.index]
        deltas = parser.push(output)
        for delta in deltas:
            builder.add(delta)
        return replace(
            output,
            text="".join(delta.content for delta in deltas),
            reasoning="".join(delta.reasoning for delta in deltas) or None,
            tool_calls=tuple(builder.choice().calls) if output.finish_reason is not None else (),
            others=tuple(map(self.separate, output.others)),
        )


def _validated(adapter: TypeAdapter[Any], given: object, name: str) -> Any:
    try:
        return adapter.validate_python(list(given) if isinstance(given, Sequence) and not isinstance(given, str) else given, strict=True)
    except ValidationError as error:
        raise InvalidRequest.from_validation(error, name) from None


def _variables(options: ChatOptions) -> dict[str, Any]:
    """Returns the chat template's inputs beside messages and tools. Raises InvalidRequest."""
    variables = chat_messages.checked_variables(options.chat_template_kwargs or {})
    if options.continue_final_message:
        variables["continue_final_message"] = True
    if options.continue_final_message or not options.add_generation_prompt:
        variables["add_generation_prompt"] = False
    return variables
