"""The documentation: pages that are made from the code, links, and numbers that pages state."""

import importlib
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from chairlift import config, sampling, template_process, template_renderer
from chairlift.chat import messages
from chairlift.cli import main
from chairlift.config import EngineConfig
from chairlift.engine import handshake, heartbeat, held_sequences, watchdog
from chairlift.grammar import json_schema, trial, usage
from chairlift.server import (
    embedding,
    engine_keeper,
    engine_listener,
    lifecycle,
    registry,
    session_name,
    streaming,
    supervisor,
    tokenizing,
    turns,
)
from chairlift.server.batch import input as batch_input
from chairlift.server.chat import request as chat_request
from chairlift.server.config import ServerConfig
from chairlift.server.http import bodies, body, connections, protocol
from chairlift.server.middleware import access
from chairlift.server.observability import engine_metrics, latencies
from chairlift.server.routes import tokenize
from chairlift.server.routes.openai import completions
from chairlift.server.schema import fields, logprobs, response_format
from chairlift.server.storage import batches, files
from chairlift.sim import plan, proposal, shadow
from chairlift.sim import sessions as agents

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s#]+)(?:#[^()\s]*)?\)")

RUST = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
PYTHON = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
[JOURNAL] = re.findall(r'VERSION: &\[u8\] = b"(\d+)', (ROOT / "rust/core/src/journal/format.rs").read_text())
CORE, SERVER = EngineConfig(), ServerConfig()
STEPS = dict(re.findall(r"^\| (decode/\d+) \| ([\d.]+) ", (ROOT / "benches/results/scheduler.md").read_text(), re.MULTILINE))
"""Microseconds of steps in Rust, as measured."""


def core(file: str, name: str) -> int:
    """A constant of the core in Rust."""
    [value] = re.findall(rf"const {name}: \w+ = ([\w <]+);", (ROOT / "rust/core/src" / file).read_text())
    number, _, shift = value.replace("_", "").partition("<<")
    return int(number) << int(shift or 0)


KEEP_ALIVE = f"{streaming.KEEP_ALIVE_SECONDS:.0f} s"
TURN = f"{CORE.max_session_wait_ms / 60_000:g} minutes"

STATED = {
    "README.md": (f"Rust {RUST}", f"Python {PYTHON}", f"An agent may wait {TURN}."),
    "docs/install.md": (f"Python {PYTHON} or later", f"Rust {RUST} or later"),
    "docs/api.md": (
        f"1 to {sampling.MAX_SEQUENCES}",
        f"up to {sampling.MAX_STOP_STRINGS} strings of at most {sampling.MAX_STOP_LENGTH:,} characters",
        f"tokens that end the output, at most {sampling.MAX_STOP_TOKENS}",
        f"at most {sampling.MAX_BIASED:,} | none",
        f"texts that are never completed; at most {sampling.MAX_BAD_WORDS}",
        f"or a list of up to {fields.MAX_PROMPTS} of either",
        f"may ask for {fields.MAX_ANSWERS:,} answers in all",
        f"| {completions.DEFAULT_MAX_TOKENS}; in chats the rest of the context |",
        f"A response may contain {logprobs.MAX_LOGPROBS:,} log-probabilities",
        f"`tokens`, at most {tokenize.MAX_TOKENS:,}",
        f"A text may have {tokenizing.MAX_CHARACTERS:,} characters",
    ),
    "docs/api/errors.md": (
        f"| headers | {access.MAX_HEADERS}; {protocol.HEADER_BYTES >> 10} KiB in total |",
        f"| a connection without complete headers | {protocol.HEADERS_SECONDS:.0f} s |",
        f"| body | {SERVER.max_body_size >> 20} MiB, or `--max-body-size`; {body.LARGE >> 10} KiB of `PATCH` |",
        f"| objects, arrays and fields in a body | {body.MAX_VALUES:,} |",
        f"| {logprobs.MAX_LOGPROBS:,} | 400 |",
        f"| time to receive the body | {body.BODY_TIMEOUT} s, and 1 s for each {body.BODY_RATE >> 10} KiB |",
        f"| idle time between two requests of a connection | {supervisor.KEEP_ALIVE_SECONDS} s |",
        f"| connections | {connections.MAX_CONNECTIONS:,}; ",
        f"half of the connections; {bodies.MAX_BODIES_BYTES >> 20} MiB, or",
        f"| TLS handshake | {protocol.HANDSHAKE_SECONDS:.0f} s |",
        f"KiB a second | {protocol.STALL_SECONDS:.0f} s in all |",
        f"| prompts in a request; messages; tools | {fields.MAX_PROMPTS}; {chat_request.MAX_MESSAGES:,}; {chat_request.MAX_TOOLS} |",
        f"| {template_process.MAX_SECONDS:.0f} s of processor time, {template_process.MAX_BYTES >> 20} MiB, "
        f"{template_renderer.MAX_CHARACTERS >> 20} Mi characters |",
        f"| texts of control tokens in the messages of a chat | {template_renderer.MAX_CONTROL_TOKENS:,} |",
        f"incoming data for up to {protocol.LINGER_SECONDS:.0f} s",
        f"A stream without an event for {KEEP_ALIVE} ",
    ),
    "docs/api/chat.md": (
        f"at most {chat_request.MAX_VARIABLES}, ",
        f"{chat_request.MAX_TOOLS} functions",
        f"{messages.MAX_CALLS} calls in a message",
    ),
    "docs/api/conversations.md": (
        f"{TURN} by default",
        f"more than {session_name.MAX_LENGTH} characters",
        f"in\n  {turns.MAX_BYTES >> 20} MiB that are shared",
    ),
    "docs/api/keys.md": (f"the last {core('memory/block/users.rs', 'MAX_USERS')} tenants",),
    "docs/api/structured-output.md": (
        f"| more than {trial.CPU_SECONDS:.0f} s of processor time to compile |",
        f"| more than {trial.MAX_BYTES >> 20} MiB, or a stack of more than {trial.STACK_BYTES >> 20} MiB |",
        f"| more than {trial.MAX_ITEMS:,} items of the parser for one token, or {trial.MAX_LEXER_STATES:,} states",
        f"| much more than {usage.CALL_SECONDS * 1000:g} ms of processor time a token |",
        f"{json_schema.MAX_DEPTH} schema levels, {json_schema.MAX_REGEX:,} characters for a regular expression",
        f"{response_format.MAX_CHOICES:,} choices; `minItems` and similar\nup to {json_schema.MAX_COUNT:,}",
    ),
    "docs/production.md": (f"nothing else for {KEEP_ALIVE}",),
    "docs/troubleshooting.md": (f"sends every {KEEP_ALIVE}", f"more than {registry.MAX_REQUESTS:,} requests have ended"),
    "docs/api/health.md": (
        f"no step ended for {watchdog.STUCK_SECONDS:.0f} s, or for\n{watchdog.STUCK_STEPS} times the step's predicted duration",
        f"found, after {heartbeat.SILENT_AFTER:.0f} s",
        f"and so on to {engine_keeper.MAX_RESTART_DELAY} s",
        f"the rest of {lifecycle.FIRST_START_SECONDS:.0f} s",
        f"`--shutdown-timeout` seconds ({SERVER.shutdown_timeout:.0f})",
    ),
    "docs/api/batches.md": (
        f"| file | {files.MAX_FILE_BYTES >> 20} MiB |",
        f"| {files.MAX_FILES:,} and {files.MAX_ALL_FILES:,} |",
        f"| requests in a batch | {batch_input.MAX_REQUESTS:,} |",
        f"| {batches.MAX_OPEN_BATCHES} and {batches.MAX_ALL_OPEN_BATCHES:,} |",
        f"After {batches.WINDOW_SECONDS // 3600} hours",
        f"forgotten {batches.KEPT_SECONDS // 86400} days after their end",
        f"if there are more than {batches.MAX_BATCHES:,}",
        f"`--max-data-size` ({SERVER.max_data_size >> 30} GiB)",
    ),
    "docs/api/embeddings.md": (f"at most {embedding.MAX_INPUTS:,}", f"at most {embedding.MAX_INPUTS - 1:,} texts"),
    "docs/api/explain.md": (
        f"The server knows the last {registry.MAX_REQUESTS:,} requests",
        f"the last {registry.MAX_REFUSALS:,} refusals",
    ),
    "docs/live-sequences.md": (
        f"may hold {held_sequences.MAX_PER_TENANT:,} live sequences, and all tenants together {held_sequences.MAX_HELD:,}",
        f"({held_sequences.LEASE:.0f} seconds by default",
    ),
    "docs/metrics.md": (f"{engine_metrics.MAX_TENANTS} tenants have a label", f"The first\n{latencies.MAX_TENANTS} tenants have labels"),
    "docs/fleet.md": (
        f"At most {engine_listener.MAX_HANDSHAKES} connections that have not proved the secret are open, "
        f"for at most {handshake.PROOF_SECONDS:.0f} seconds",
    ),
    "docs/tuning.md": (
        f"`--gpu-memory-utilization` ({CORE.gpu_memory_utilization:g})",
        f"On a CPU it is {config.DEFAULT_STEP_TOKENS} by default. For models of up to {config.TILES_WEIGHTS // 10**6} million weights on\n"
        f"processors with AMX it is {config.TILES_STEP_TOKENS}, and {2 * config.TILES_STEP_TOKENS} with `--cpu-math fast`",
    ),
    "docs/lab.md": (
        f"at most {shadow.CPU_SHARE * 100:.0f} % of one core",
        f"The figures cover {shadow.WINDOW_SECONDS / 60:.0f} minutes",
        f"takes {shadow.SLICE_CPU_SECONDS:.0f} seconds of CPU time",
        f"95 % of {proposal.RESAMPLES} hours",
        f"by {proposal.MIN_EFFECT * 100:.0f} % or more",
        f"at least {proposal.MIN_REQUESTS} requests, of which {proposal.MIN_COVERED * 100:.0f} % were simulated",
    ),
    "docs/capacity.md": (f"`--max-think-time` ({agents.THINK_TIME:.0f} s)",),
    "docs/capacity/plan.md": (
        f"half of the measured step times are off by more than {plan.MAX_ERROR * 100:.0f} %",
        f"`--duration` seconds ({agents.DURATION / 3600:g} hours)",
    ),
    "docs/scheduling/policies.md": (f"`--background-slowdown` ({CORE.background_slowdown:g})",),
    "docs/scheduling/admission.md": (
        f"`--watermark` ({CORE.watermark:g})",
        f"`--queue-ageing-ms` ({CORE.queue_ageing_ms:,.0f})",
        f"up to {core('scheduler/admit.rs', 'MAX_REJECTED')} such requests",
        f"bypassed at most {core('scheduler/admit.rs', 'MAX_BYPASSED')} times",
    ),
    "docs/scheduling/preemption.md": (f"preempted at most {core('sequence/mod.rs', 'MAX_PREEMPTIONS')} times",),
    "docs/scheduling/sessions.md": (
        f"keeps {core('sessions/directory.rs', 'MAX_SESSIONS'):,} sessions",
        f"`--max-session-wait-ms` ({TURN})",
    ),
    "docs/speculative-decoding.md": (f"at most: 1 to {core('step/draft.rs', 'MAX_DRAFT')} |",),
    "docs/lora.md": (f"| `max_lora_rank` | adapters of a higher rank are refused | {CORE.max_lora_rank} |",),
    "docs/scheduling/reference.md": (f"| {STEPS['decode/256']} µs |", f"| {STEPS['decode/1024']} µs; "),
    "docs/scheduling/journal.md": (f"The first line names the version, {JOURNAL}.",),
}
"""What pages say of limits, times and defaults, with the code's numbers."""


@pytest.mark.parametrize("page", STATED)
def test_the_numbers_that_a_page_states_are_those_of_the_code(page):
    text = (ROOT / page).read_text()
    assert [stated for stated in STATED[page] if stated not in text] == []


def test_the_reference_is_made_of_the_code(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "generators")
    made = importlib.import_module("reference").pages()
    stale = [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]
    assert stale == [], "run: make docs-reference"
    assert {path.name for path in made} == {path.name for path in (DOCS / "reference").glob("*.md")}


def test_every_metric_is_explained():
    names = re.findall(r"^\| `chairlift_(\w+?)(?:_total)?` ", (DOCS / "reference/metrics.md").read_text(), re.MULTILINE)
    explained = (DOCS / "metrics.md").read_text()
    stems = {re.sub(r"_by_(tenant|class|tier)(_seconds)?$", r"\2", name) for name in names}
    assert len(stems) > 50
    assert sorted(stem for stem in stems if f"`{stem}" not in explained and f"`{stem}_by_tenant`" not in explained) == []


def test_the_codes_of_errors_are_those_of_the_code():
    known = re.findall(r"^\| `(\w+)` ", (DOCS / "reference/errors.md").read_text(), re.MULTILINE)
    table = (DOCS / "api/errors.md").read_text().partition("## Errors\n")[2]
    codes = {code for row in re.findall(r"^\| \d{3}[\d, ]* \|([^|]*)\|", table, re.MULTILINE) for code in re.findall(r"`(\w+)`", row)}
    assert len(codes) > 30
    assert codes <= set(known)


FOREIGN = {
    *(
        "--append",
        "--apply_chat_template",
        "--cpus",
        "--enable-prompt-tokens-details",
        "--gate",
        "--gpus",
        "--groups",
        "--head",
        "--home-dir",
        "--ipc",
        "--kv-unified",
        "--log_samples",
    ),
    *(
        "--memory",
        "--model-id",
        "--model_args",
        "--nocapture",
        "--now",
        "--oss",
        "--output_path",
        "--override-with-envs",
        "--parallel",
        "--peers",
        "--proto",
        "--read-only",
        "--repo",
        "--rm",
        "--shell",
    ),
    *("--shm-size", "--tag", "--target", "--tasks", "--time", "--tlsv1", "--unix-socket", "--upgrade"),
}
"""Flags of other programs that pages name."""


def test_the_flags_that_pages_name_exist():
    known = set(re.findall(r"`(--[a-z][\w-]*)`", (DOCS / "reference/cli.md").read_text())) | {"--help", "--help-all", "--version"}
    named = {}
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]:
        code = "".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL))
        named |= dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w-]*", code), page.name)
    assert len(named) > 100
    assert {flag: page for flag, page in named.items() if flag not in known | FOREIGN} == {}


def linked(page: Path) -> set[Path]:
    """The pages that a page links to."""
    targets = {(page.parent / path).resolve() for path in LINK.findall(page.read_text()) if "://" not in path}
    return {target for target in targets if target.suffix == ".md" and target.is_relative_to(DOCS)}


def test_two_links_lead_from_the_index_to_every_page():
    first = linked(DOCS / "index.md")
    reached = first | {target for page in first for target in linked(page)}
    assert sorted(str(page.relative_to(DOCS)) for page in set(DOCS.rglob("*.md")) - reached - {DOCS / "index.md"}) == []


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_links_lead_to_files():
    pages = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
    targets = [(page, page.parent / path) for page in pages for path in LINK.findall(page.read_text()) if "://" not in path]
    assert len(targets) > 300
    assert [f"{page.name}: {target}" for page, target in targets if not target.exists()] == []


def test_each_promise_of_the_security_policy_names_tests_that_exist():
    rows = [
        line.strip("|\n").split("|") for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ") and "`" in line
    ]
    assert len(rows) > 60
    missing = []
    for promise, tests in rows:
        folder = ROOT
        for name in re.findall(r"`([^`]+)`", tests):
            file = ROOT / name if "/" in name else folder / name  # a name alone is in the folder of the one before
            folder = file.parent
            missing += [] if file.is_file() else [f"{promise.strip()}: {name}"]
    assert missing == []


def test_the_chart_is_drawn_from_the_results(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "generators")
    drawn = importlib.import_module("speed_chart")
    assert drawn.chart() == drawn.CHART.read_text(), "run: make docs-reference"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900


def commands() -> dict[str, str]:
    """The commands of Chairlift that pages and the helps of commands show in blocks, with the name of a page or a module."""
    shown = {}
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]:
        for block in re.findall(r"```(?:sh|bash|console)?\n(.*?)```", page.read_text(), re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            shown |= {re.sub(r"\s#.*", "", line.removeprefix("$ ")): page.name for line in lines}
    for module in (ROOT / "python/chairlift/cli").glob("*.py"):
        lines = re.findall(r"^  (chairlift [a-z].*)", module.read_text(), re.MULTILINE)
        shown |= {re.sub(r"  .*", "", line).replace("{name}", "latency"): module.name for line in lines}
    parts = {part.strip(): name for line, name in shown.items() for part in re.split(r"[|&;]+", line)}
    return {part: name for part, name in parts.items() if part.startswith("chairlift ")}


def test_the_commands_that_pages_and_helps_show_have_arguments_that_exist(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("CHAIRLIFT_")]:
        monkeypatch.delenv(name)
    main.main(["policy", "new", "Mine"])
    wrong, parsers, shown = {}, {}, commands()
    assert len(shown) > 100
    for command, name in shown.items():
        arguments = shlex.split(command)[1:]
        arguments[0] = main.ALIASES.get(arguments[0], arguments[0])
        if arguments[0] not in parsers:
            parsers[arguments[0]] = main.build_parser(arguments[0])
        try:
            parsers[arguments[0]].parse_args(arguments)
        except SystemExit:
            wrong[command] = (name, capsys.readouterr().err)
    assert wrong == {}
