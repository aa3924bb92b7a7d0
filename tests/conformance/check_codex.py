"""OpenAI's Codex CLI, over the Responses API and as a client of Ollama: answers, tools, too long a prompt, a conversation."""

import json
import subprocess
import sys

import pytest
from codex_cli_bin import bundled_codex_path

MODEL = "org/fake-model"
CONFIG = """
model = "{model}"
model_provider = "chairlift"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.chairlift]
name = "chairlift"
base_url = "{base}/v1"
wire_api = "responses"
env_key = "CHAIRLIFT_KEY"
request_max_retries = 0
stream_max_retries = 0
[mcp_servers.clock]
command = "{python}"
args = ["-c", {server}]
"""
MCP_SERVER = """
import json, sys
TIME = {"name": "now", "annotations": {"readOnlyHint": True}, "inputSchema": {"type": "object", "properties": {"zone": {"type": "string"}}}}
for line in sys.stdin:
    message = json.loads(line)
    asked = message.get("params") or {}
    result = {
        "initialize": {
            "protocolVersion": asked.get("protocolVersion"),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "clock", "version": "1"},
        },
        "tools/list": {"tools": [TIME]},
        "tools/call": {"content": [{"type": "text", "text": f"SAY:It is noon in {(asked.get('arguments') or {}).get('zone')}.|"}]},
    }.get(message["method"], {})
    if "id" in message:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


@pytest.fixture
def ask(scripted, alone, project):
    """Runs `codex exec` with a prompt in the project; returns its events."""
    home = project.parent / "codex"
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.format(base=scripted, model=MODEL, python=sys.executable, server=json.dumps(MCP_SERVER)))

    def run(prompt, *flags):
        command = [bundled_codex_path(), "exec", "--skip-git-repo-check", "--json", *flags, "-"]
        environ = alone | {"CODEX_HOME": str(home), "CODEX_OSS_BASE_URL": f"{scripted}/v1"}
        done = subprocess.run(command, input=prompt, capture_output=True, text=True, cwd=project, env=environ, timeout=300)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run


def items(events, kind):
    return [event["item"] for event in events if event["type"] == "item.completed" and event["item"]["type"] == kind]


def test_an_answer(ask):
    events = ask("SAY:Hello there.|")
    assert [item["text"] for item in items(events, "agent_message")] == ["Hello there."]
    assert events[-1]["usage"]["input_tokens"] > 1000


def test_the_server_passes_for_ollama(ask):
    events = ask("SAY:Hello there.|", "--oss", "--local-provider", "ollama", "-m", MODEL)
    assert [item["text"] for item in items(events, "agent_message")] == ["Hello there."]


def test_a_command_and_its_output(ask):
    events = ask('SAY:<tool_call>{"name": "exec_command", "arguments": {"cmd": "cat note.txt"}}</tool_call>|')
    assert [item["exit_code"] for item in items(events, "command_execution")] == [0]
    assert [item["text"] for item in items(events, "agent_message")] == ["All is well."]


def test_a_tool_of_an_mcp_server(ask):
    """Codex sends such tools in a namespace, and runs a call only if it names both."""
    events = ask('SAY:<tool_call>{"name": "mcp__clock__now", "arguments": {"zone": "Bern"}}</tool_call>|')
    [called] = items(events, "mcp_tool_call")
    assert (called["server"], called["tool"], called["status"]) == ("clock", "now", "completed")
    assert [item["text"] for item in items(events, "agent_message")] == ["It is noon in Bern."]


def test_it_knows_that_a_prompt_is_too_long(ask):
    assert "ran out of room in the model's context window" in ask("word " * 90_000)[-1]["error"]["message"]


def test_a_conversation_stays_in_the_cache(ask, notes, cache_use):
    first = notes(lambda name: f'<tool_call>{{"name": "exec_command", "arguments": {{"cmd": "cat {name}"}}}}</tool_call>')
    rest = ("resume", "--last", "--skip-git-repo-check", "--json")
    for prompt, commands, answer, flags in (
        (f"SAY:{first}|", 4, "All read.", ()),
        ("SAY:Well done.|", 0, "Well done.", rest),
        (f"Once more. SAY:I look. {first}|", 4, "All read.", rest),
    ):
        events = ask(prompt, *flags)
        assert [item["exit_code"] for item in items(events, "command_execution")] == [0] * commands
        assert items(events, "agent_message")[-1]["text"] == answer
    assert min(cache_use()) >= 0.95
