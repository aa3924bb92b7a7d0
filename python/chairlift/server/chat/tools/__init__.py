"""Calls of tools: how models write them, one syntax a file, and how those are told of tools that have no template for it."""

from __future__ import annotations

from chairlift.server.chat.tools.hermes import Hermes
from chairlift.server.chat.tools.llama import Llama
from chairlift.server.chat.tools.mistral import Mistral
from chairlift.server.chat.tools.syntax import Syntax

SYNTAXES: dict[str, type[Syntax]] = {"hermes": Hermes, "llama": Llama, "mistral": Mistral}

_SIGNS = {"mistral": ("[TOOL_CALLS]",), "hermes": ("<tool_call>",), "llama": ("<|python_tag|>", "ipython")}
"""What chat templates say that write calls so."""


def syntax_of(template: str) -> type[Syntax]:
    """How a model with this chat template writes calls; Hermes' way where the template does not say."""
    return next((SYNTAXES[name] for name, signs in _SIGNS.items() if any(sign in template for sign in signs)), Hermes)
