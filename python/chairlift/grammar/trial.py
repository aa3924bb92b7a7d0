"""Compiles grammars in a separate process first, with limits on time and memory.

llguidance bounds most of its work, but not all. A schema of 50 characters can take minutes and gigabytes. A schema of a few thousand
characters can overflow the stack, which kills the process. The text does not show this in advance. Each grammar is therefore first compiled
in a process that may be killed: a fork of `python -m chairlift.grammar.trial`, which holds the vocabulary.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chairlift.checkpoint.tokenizer_files import load_backend, tokenizer_config
from chairlift.child_process import start_python
from chairlift.errors import InvalidRequest, RequestFailed
from chairlift.grammar.allowance import Allowance
from chairlift.grammar.grammar import LIMIT_REACHED, TOO_COMPLEX, check
from chairlift.grammar.source import schemas_by_tool, source
from chairlift.grammar.usage import TENANT_SECONDS, GrammarUsage
from chairlift.sampling import StructuredOutput

if TYPE_CHECKING:
    from chairlift._core import GrammarMatcher, GrammarVocabulary

CPU_SECONDS = 1.0
"""CPU seconds that a grammar may take to compile. Schemas in use take milliseconds; one with 1500 properties took 0.2 s when measured."""
WALL_SECONDS = 30.0
"""Limit in wall-clock seconds, for a machine so loaded that the CPU time above takes as long."""
MAX_BYTES = 256 * 2**20
"""Bytes of memory that one grammar may take."""
STACK_BYTES = 4 * 2**20
MAX_LEXER_STATES = 50_000
"""A fifth of llguidance's default. Their number grows with every answer, and each takes up to 2 kB."""
MAX_ITEMS = 10_000
"""Maximum items of the parser in a row, and in all rows that one mask tries. llguidance's defaults, 2,000 and 50,000, refuse long lists of
alternatives and admit masks of 0.4 s. An answer with 1,000 optional properties needs almost 10,000."""
TRIED_TOKENS = 64
"""Tokens of an arbitrary answer that the trial drives a grammar through."""
MAX_MESSAGE = 400
"""Maximum characters of llguidance's message to report, because the message may repeat the grammar."""


class Vocabulary(NamedTuple):
    """The vocabulary that masks cover: a file such as tokenizer.json, the model's number of tokens, and the tokens that end an answer."""

    file: Path
    size: int
    ends: tuple[int, ...]

    def load(self) -> GrammarVocabulary:
        """Reads the file, which takes a second of processor time for 250,000 tokens. Raises InvalidRequest if no grammar can use it."""
        from chairlift._core import GrammarVocabulary

        # llguidance reads tokenizer.json only.
        is_json = self.file.name == "tokenizer.json"
        try:
            data = self.file.read_bytes() if is_json else load_backend(self.file, tokenizer_config(self.file)).to_str().encode()
            return GrammarVocabulary(data, size=self.size, ends=self.ends)
        except OSError as error:
            raise InvalidRequest(f"this model's tokenizer can't be used with grammars: {error.strerror}") from None
        except ValueError as error:
            raise InvalidRequest(f"this model's tokenizer can't be used with grammars: {shortened(str(error))}") from None


def compiled(vocabulary: GrammarVocabulary, structure: StructuredOutput) -> GrammarMatcher:
    """Compiles the grammar and computes its first mask, which detects most errors. Raises InvalidRequest."""
    try:
        return _compiled(vocabulary, structure)
    except InvalidRequest as error:
        if structure.param != "tools":
            raise
        for name, schema in schemas_by_tool(structure).items():
            try:
                _compiled(vocabulary, StructuredOutput("json", json.dumps(schema)))
            except InvalidRequest as cause:
                raise InvalidRequest(f"the parameters of {name}: {cause}", code=cause.code) from None
        raise error


def _compiled(vocabulary: GrammarVocabulary, structure: StructuredOutput) -> GrammarMatcher:
    from chairlift._core import GrammarMatcher

    try:
        matcher = GrammarMatcher(vocabulary, source(structure), max_items=MAX_ITEMS, max_lexer_states=MAX_LEXER_STATES)
    except ValueError as error:
        raise InvalidRequest(shortened(str(error))) from None
    if matcher.error is None:
        matcher.mask()
    if matcher.error is not None:
        message = shortened(matcher.error)
        if LIMIT_REACHED.match(message):
            raise InvalidRequest(f"it is too complex ({message}): make it simpler", code=TOO_COMPLEX)
        raise InvalidRequest("no answer can have this form" if message.startswith("NoExtension") else message)
    return matcher


def shortened(message: str) -> str:
    """Formats an error of llguidance on one line of limited length, without the lines that quote the grammar."""
    first, *others = message.removesuffix("<non-verbose/>").strip().splitlines() or [""]
    causes = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    message = " ".join(" ".join((first, *causes)).split())
    if message.startswith("oneOf constraints"):
        return "oneOf is supported only if no answer can match two of its alternatives: use anyOf"
    if len(message) <= MAX_MESSAGE:
        return message
    return f"{message[: MAX_MESSAGE // 2]} ... {message[-MAX_MESSAGE // 2 :]}"


class Trial:
    """The process that tries grammars one after another."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        """Starts the process, which loads the vocabulary, unless it runs."""
        if self._process is None or self._process.poll() is not None:
            file, *others = self._vocabulary
            arguments = "-m", "chairlift.grammar.trial", json.dumps([str(file), *others])
            self._process = start_python(*arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self._process

    def run(self, structure: StructuredOutput) -> int:
        """Returns the grammar's bytes. Raises InvalidRequest if it is invalid or too large, RequestFailed if the trial itself failed."""
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(structure) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise RequestFailed("the process that tries grammars has ended; try again")
        verdict = json.loads(line)
        if verdict["error"] is not None:
            raise InvalidRequest(verdict["error"], code=verdict.get("code"))
        return int(verdict["bytes"])

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def main() -> None:
    """Reads one grammar per line and writes one result per line, until the input ends."""
    file, size, ends = json.loads(sys.argv[1])
    broken = None
    try:
        vocabulary = Vocabulary(Path(file), size, tuple(ends)).load()
    except InvalidRequest as error:
        broken = str(error)
    for line in sys.stdin:
        verdict = {"error": broken} if broken else _fork(vocabulary, ends, StructuredOutput(*json.loads(line)))
        try:
            print(json.dumps(verdict), flush=True)
        except BrokenPipeError:  # the parent has ended
            os._exit(1)


def _fork(vocabulary: GrammarVocabulary, ends: Sequence[int], structure: StructuredOutput) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            _bound()
            os.write(writing, json.dumps(_verdict(vocabulary, ends, structure)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        reply = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM):
        return {"error": f"it takes longer to compile than the {CPU_SECONDS:g} s that it may: make it simpler", "code": "grammar_timeout"}
    if not reply:
        return {"error": "it takes too much memory to compile, or is nested too deeply: make it simpler", "code": "grammar_too_large"}
    verdict: dict[str, Any] = json.loads(reply)
    return verdict


def _bound() -> None:
    """Sets this process's resource limits. Exceeding them kills it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())  # Rust writes its panic messages here
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)


def _verdict(vocabulary: GrammarVocabulary, ends: Sequence[int], structure: StructuredOutput) -> dict[str, Any]:
    usage, before = GrammarUsage(Allowance(TENANT_SECONDS)), _resident_bytes()
    try:
        matcher = compiled(vocabulary, structure)
    except InvalidRequest as error:
        return {"error": str(error), "code": error.code}
    try:
        # Everything that runs outside the engine's thread with the large stack runs here with the small one.
        _drive(matcher.copy(), ends, usage)
    except InvalidRequest as error:
        # An arbitrary answer may take the lexer more states than one that makes sense, or come to a place without a way to go on.
        if error.code is not None and not usage.broken:
            return {"error": str(error), "code": error.code}
    except ValueError as error:
        return {"error": shortened(str(error)), "code": None}
    return {"error": None, "bytes": max(0, _resident_bytes() - before)}


def _resident_bytes() -> int:
    """Bytes of memory that this process uses, without those of files; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    _, resident, files, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(files)) * resource.getpagesize()


_ANY_BIT = re.compile(rb"[^\0]")


def _drive(matcher: GrammarMatcher, ends: Sequence[int], usage: GrammarUsage) -> None:
    """Writes an arbitrary answer, the same one each time. Raises InvalidRequest if the grammar takes too much, ValueError if it fails."""
    dice = random.Random(0)
    for _ in range(TRIED_TOKENS):
        usage.check()
        mask = usage.call(matcher.mask)
        check(matcher, usage)
        found = _ANY_BIT.search(mask, dice.randrange(len(mask))) or _ANY_BIT.search(mask)
        if found is None:
            return
        at, octet = found.start(), found[0][0]
        token = 8 * at + octet.bit_length() - 1
        if token in ends:
            return
        usage.call(matcher.consume, token)
        usage.call(matcher.forced)
        check(matcher, usage)


if __name__ == "__main__":
    main()
