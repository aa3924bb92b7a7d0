"""How a model writes conversations: its chat template, its reasoning and its tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from chairlift.chat.functions import ToolSpec
from chairlift.chat.reasoning import REASONING_FORMATS, TAIL_TOKENS, Reasoning, format_for_template
from chairlift.chat.tools.formats import TOOL_PARSERS, parser_for_template
from chairlift.chat.tools.hermes import Hermes
from chairlift.chat.tools.parser import ToolParser
from chairlift.chat.tools.prompted import add_tool_prompt
from chairlift.chat.user_turn import up_to_user
from chairlift.errors import InvalidRequest
from chairlift.grammar.source import ReasoningFormat

if TYPE_CHECKING:
    from chairlift.tokenizer import Tokenizer


class TemplateInputs(NamedTuple):
    """What the chat template renders, and the parser for the tool calls that it elicits."""

    conversation: list[dict[str, Any]]
    variables: dict[str, Any]
    parser_type: type[ToolParser]
    tools: list[dict[str, Any]]
    """The tools that the model may call, whether or not the template has a place for them."""


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A model's tokenizer, with its chat template, and the formats of its answers."""

    tokenizer: Tokenizer
    vocab_size: int
    tool_call_parser: str = "auto"
    """Name of a tool-call parser, or `auto` to choose one by the chat template."""
    reasoning_parser: str = "auto"
    """Name of a reasoning format, `auto` to choose one by the chat template, or `none`."""

    def template_inputs(self, conversation: list[dict[str, Any]], variables: Mapping[str, Any], tool_spec: ToolSpec) -> TemplateInputs:
        """Returns the inputs of the chat template for messages and tools. Raises InvalidRequest."""
        given = dict(variables)
        tools = [{"type": "function", "function": tool.for_template()} for tool in tool_spec.tools]
        template = self.tokenizer.template
        if given.get("documents") and not template.uses("documents"):
            raise InvalidRequest("this model's chat template has no place for documents: put them into a message", param="documents")
        name = self.tool_call_parser
        parser_type = parser_for_template(template.source) if name == "auto" else TOOL_PARSERS[name]
        if not tools and not any(message["role"] == "tool" or "tool_calls" in message for message in conversation):
            return TemplateInputs(conversation, given, parser_type, tools)
        if not template.uses("tools"):
            prompted = add_tool_prompt(conversation, tools, has_system=not tools or template.has_system)
            return TemplateInputs(prompted, given, Hermes, tools)
        return TemplateInputs(parser_type.history(conversation), {**given, "tools": tools} if tools else given, parser_type, tools)

    def inputs_up_to_user(
        self, conversation: list[dict[str, Any]], variables: Mapping[str, Any], tool_spec: ToolSpec
    ) -> TemplateInputs | None:
        """Returns the inputs of the chat template for the messages up to the user's last one; None if there is none, or nothing follows it.

        Raises InvalidRequest.
        """
        if (asked := up_to_user(conversation)) is None:
            return None
        inputs = self.template_inputs(asked, variables, tool_spec)
        return inputs._replace(variables=inputs.variables | {"add_generation_prompt": False, "continue_final_message": False})

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """How the model marks its reasoning; None if it does not reason."""
        name = self.reasoning_parser
        return format_for_template(self.tokenizer.template.source) if name == "auto" else REASONING_FORMATS.get(name)

    def reasoning_after(self, prompt: Sequence[int], continued: Mapping[str, Any] | None) -> Reasoning | None:
        """Returns how answers to `prompt`, which continue the message `continued`, contain reasoning; None if they do not."""
        form = self.reasoning_format
        if form is None:
            return None
        return Reasoning.after_prompt(form, self.tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False), continued)
