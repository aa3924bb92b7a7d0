"""Renders chat templates, which are hostile code of model files, in a process with limits: see `template_process`.

`python -m chairlift.template_renderer SECONDS BYTES` reads jobs from standard input and writes replies to standard output.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from chairlift.alternatives import alternatives
from chairlift.errors import InvalidRequest

MAX_CHARACTERS = 16 << 20
"""Maximum length of a rendered conversation: a multiple of what a request can send."""

MAX_CONTROL_TOKENS = 10_000
"""Maximum number of control tokens in what users wrote: the server holds its interpreter's lock while it reads their pieces."""

LENGTH_BYTES = 8
"""Size of the length, little-endian, before each job and each reply. In a reply the job's microseconds of CPU time come next, alike."""

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Marks around control tokens that users wrote: Unicode noncharacters, which do not occur in text."""

_END = "\ufdd2"
"""Mark after a message that is to be continued."""

_PROBE = "\ufdd3"
"""Content of a message, or an argument's name, that tells what a template does with it."""

_MARKS = str.maketrans("", "", _OPEN + _CLOSE)

_BEYOND_ASCII = re.compile(r"[^\0-~\ufdd0-\ufdd2]")
"""Characters that JSON in ASCII escapes, without the marks."""


def render(job: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Returns the conversation as pieces of text: see `ChatTemplate.render`. Raises InvalidRequest, and any error of the template."""
    messages, continued = job["messages"], job["continue_final_message"]
    if continued:
        messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{_END}"}]
    pattern = _pattern(tuple(job["controls"]))
    marked = _mark_control_tokens([messages, job["variables"]], pattern)
    messages, variables = marked or (messages, job["variables"])
    if _reads_parts(job["source"]):
        messages = [_in_parts(message) for message in messages]
    if any("tool_calls" in message for message in messages) and _takes_text_arguments(job["source"]):
        messages = [_with_text_arguments(message) for message in messages]
    text = _compiled(job["source"]).render({**job["defaults"], **variables, "messages": messages})
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"the text is longer than {MAX_CHARACTERS} characters")
    if continued:
        text = _cut_at_end_mark(text)
    if marked is None:
        return [(text, False)]
    pieces = re.split(f"{_OPEN}({pattern.pattern}){_CLOSE}", text)
    if len(pieces) // 2 > MAX_CONTROL_TOKENS:
        message = f"the messages have {len(pieces) // 2} texts of control tokens, and {MAX_CONTROL_TOKENS} are allowed"
        raise InvalidRequest(message, param="messages")
    # A template that slices strings may leave a single mark.
    cleaned = (piece.translate(_MARKS) for piece in pieces)
    return [(piece, index % 2 == 1) for index, piece in enumerate(cleaned) if piece]


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message whose content is a list with one part, if it is a text."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


@lru_cache(maxsize=8)
def _reads_parts(source: str) -> bool:
    """Whether a template shows a message's content only as a list of parts, like those of many models that also read images.

    As in llama.cpp, it is tried out (common/jinja/caps.cpp).
    """
    asked = {"role": "user", "content": _PROBE}
    return not _shows(source, asked) and _shows(source, _in_parts(asked))


def _shows(source: str, message: Mapping[str, Any]) -> bool:
    return _PROBE in _tried(source, message)


def _with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message with the arguments of its calls as JSON text."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        if not isinstance(function["arguments"], str):
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else message


@lru_cache(maxsize=8)
def _takes_text_arguments(source: str) -> bool:
    """Whether a template writes the arguments of calls as they are, like those of Functionary and Apriel. Most take an object."""
    arguments = {_PROBE: 1}

    def tried(arguments: object) -> str:
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": "", "name": "f", "tool_call_id": call["id"]}
        return _tried(source, {"role": "user", "content": "?"}, called, result)

    text, with_object = json.dumps(arguments, ensure_ascii=False), tried(arguments)
    return (not with_object or str(arguments) in with_object) and text in tried(text)


def _tried(source: str, *messages: Mapping[str, Any]) -> str:
    """Returns the rendering of `messages`; "" if the template fails."""
    variables = {"tools": None, "documents": None, "bos_token": "", "eos_token": "", "add_generation_prompt": True}
    try:
        return str(_compiled(source).render(messages=list(messages), **variables))
    except Exception:  # the rendering of the conversation reports what is wrong with the template
        return ""


def variables_read(source: str) -> list[str]:
    """Returns the variables that a template reads and does not set; raises jinja2.TemplateError for an invalid template."""
    from jinja2 import meta

    environment = _compiled(source).environment
    return sorted(meta.find_undeclared_variables(environment.parse(source)))


def _cut_at_end_mark(text: str) -> str:
    """Returns the text before the end mark; raises InvalidRequest if the template dropped the mark."""
    before, mark, _ = text.rpartition(_END)
    if not mark:
        message = "the chat template drops the end of the last message, so it cannot be continued"
        raise InvalidRequest(message, param="continue_final_message")
    return before


def _mark_control_tokens(value: Any, pattern: re.Pattern[str]) -> Any:
    """Returns a copy of `value` with marks around the control tokens in its strings; None if there are none."""
    found = False

    def copy(item: Any) -> Any:
        nonlocal found
        if isinstance(item, str):
            marked, count = pattern.subn(rf"{_OPEN}\g<0>{_CLOSE}", item.translate(_MARKS) if _OPEN in item or _CLOSE in item else item)
            found = found or count > 0
            return marked
        if isinstance(item, dict):
            return {copy(key): copy(inner) for key, inner in item.items()}
        if isinstance(item, list):
            return [copy(inner) for inner in item]
        return item

    copied = copy(value)
    return copied if found else None


@lru_cache(maxsize=8)
def _pattern(controls: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(alternatives(controls) if controls else "(?!)")


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """Compiles the template with the filters and functions that Hugging Face's templates use."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here only its content is rendered."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        # Jinja's own filter escapes HTML. Marks around control tokens stay as they are.
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        return _BEYOND_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(source)


def main(jobs: BinaryIO, replies: BinaryIO, seconds: float, num_bytes: int) -> None:
    """Answers jobs until the parent closes the pipe or ends.

    A job may take `seconds` of CPU time, then the kernel ends the process whatever it does, and (on Linux) `num_bytes` of address space.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _compiled("")  # imports Jinja, which takes as much time as many conversations, before a job's time counts
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit, (_, most) = pages * resource.getpagesize() + num_bytes, resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    while length := jobs.read(LENGTH_BYTES):
        content = jobs.read(int.from_bytes(length, "little"))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process: it has no handler
        began = time.process_time()
        reply = _reply(content)
        taken = round((time.process_time() - began) * 1e6)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(len(reply).to_bytes(LENGTH_BYTES, "little") + taken.to_bytes(LENGTH_BYTES, "little") + reply)
        replies.flush()


def _reply(content: bytes) -> bytes:
    try:
        job = decode(content)
        return encode({"result": variables_read(job["source"]) if job["messages"] is None else render(job)})
    except MemoryError:
        return encode({"error": "it needs too much memory", "param": None})
    except InvalidRequest as error:
        return encode({"error": str(error), "param": error.param})
    except Exception as error:  # any error of a template is the fault of this job
        return encode({"error": f"{str(error) or type(error).__name__:.500}", "param": None})


def encode(value: Any) -> bytes:
    """Returns `value` as JSON, in which lone surrogates survive; raises TypeError or ValueError."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def decode(content: bytes) -> Any:
    """Returns the value that `encode` was given."""
    return json.loads(content.decode("utf-8", "surrogatepass"))


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1]), int(sys.argv[2]))
