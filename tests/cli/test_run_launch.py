"""`chairlift run` and `chairlift launch`: a running server is used, another one started, and clients get its address."""

import io
import json
import os
import socket
import sys
from pathlib import Path

import pytest
from local_server import Handler, local_server

from chairlift.cli import local_server as servers
from chairlift.cli import main
from chairlift.errors import ChairliftError, ModelNotFound

CLIENT = """\
#!{python} -S
import json, os, sys
json.dump([sys.argv[1:], dict(os.environ)], open({out!r}, "w"))
sys.exit(7)
"""


class Answer(Handler):
    """A server with the models `a` and `b`, which answers with the question in capitals."""

    def do_GET(self):
        self.reply(json.dumps({"data": [{"id": "a"}, {"id": "b"}]}).encode())

    def do_POST(self):
        body = json.loads(self.body())
        text = f"{body['model']}: {body['messages'][-1]['content'].upper()}"
        finish = None if "break off" in text.lower() else "stop"
        self.reply(f"data: {json.dumps({'choices': [{'delta': {'content': text}, 'finish_reason': finish}]})}\n\n".encode())


@pytest.fixture
def url(monkeypatch):
    with local_server(Answer) as address:
        monkeypatch.setattr(servers, "URL", address)
        monkeypatch.delenv("CHAIRLIFT_CLIENT_API_KEY", raising=False)
        yield address


@pytest.fixture
def piped(monkeypatch):
    def pipe(text):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))

    pipe("")
    return pipe


def test_run_answers_one_question_with_a_running_server(url, piped, capsys):
    assert main.main(["run", "b", "hello", "there"]) == 0
    assert capsys.readouterr().out == "b: HELLO THERE\n"
    piped("a letter\n")
    assert main.main(["run", "org/a", "sum", "it", "up", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "a: SUM IT UP\n\nA LETTER\n"


def test_an_answer_that_is_broken_off_is_a_failure(url, piped, monkeypatch, capsys):
    assert main.main(["run", "b", "break off"]) == 1
    assert capsys.readouterr() == ("b: BREAK OFF", f"chairlift: the server at {url} broke the answer off\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("break off\ngo on\n"))
    assert main.main(["chat", "--url", url, "--model", "b"]) == 0
    out, err = capsys.readouterr()
    assert "b: GO ON" in out
    assert "broke the answer off (/reset starts" in err


def test_a_server_without_models_is_told(url, piped, monkeypatch, capsys):
    monkeypatch.setattr(Answer, "do_GET", lambda self: self.reply(b'{"data": []}'))
    assert main.main(["chat", "--url", url]) == 1
    assert capsys.readouterr().err == f"chairlift: the server at {url} lists no model: name one\n"
    assert main.main(["run", "--url", url]) == 2, "no question"
    piped("hello")
    assert main.main(["run", "--url", url]) == 1
    assert f"the server at {url} lists no model: it has none" in capsys.readouterr().err


def test_run_without_a_question_in_a_pipe_is_wrong_usage(url, piped, capsys):
    assert main.main(["run", "b"]) == 2
    assert "no question" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["{}", "[]", "<html>"])
def test_another_program_at_the_usual_address_is_no_server(url, answer, monkeypatch, capsys):
    monkeypatch.setattr(Answer, "do_GET", lambda self: self.reply(answer.encode()))
    monkeypatch.setattr(servers, "_command", lambda model, port: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(ChairliftError, match="the server ended with status 3"), servers.server_for("b", None, None):
        pass
    assert f"chairlift: {'no chairlift server' if answer == '<html>' else 'what listens'} at {url}" in capsys.readouterr().err
    with pytest.raises(ChairliftError, match=f"at {url}"), servers.server_for("b", url, None):
        pass


def test_a_server_without_the_model_is_refused_if_it_was_named(url, piped, capsys):
    assert main.main(["run", "c", "hello", "--url", url]) == 1
    assert f"the server at {url} does not serve c: it has a, b" in capsys.readouterr().err
    with pytest.raises(ModelNotFound), servers.server_for("c", url, None):
        pass


def test_a_server_is_started_for_the_time_of_the_block(url, monkeypatch, capsys):
    commands = []

    def fake(model, port):
        commands.append((model, port))
        return [sys.executable, str(Path(__file__).parent.parent / "support" / "serve_small.py"), str(port)]

    monkeypatch.setattr(servers, "_command", fake)
    with servers.server_for("org/other", None, None) as (address, name):
        [(model, port)] = commands
        assert (model, address, name) == ("org/other", f"http://127.0.0.1:{port}", "small")
        assert address != url
        port = int(address.rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert "starting a server for org/other" in capsys.readouterr().err


def test_a_server_that_cannot_start_is_an_error(url, monkeypatch):
    monkeypatch.setattr(servers, "_command", lambda model, port: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(ChairliftError, match="the server ended with status 3"), servers.server_for("other", None, None):
        pass


def test_a_started_server_has_no_variables_of_another_server(url, monkeypatch):
    kept = ("DEVICE", "TOOL_CALL_PARSER", "REASONING_PARSER", "EXACT_HISTORY", "MAX_BODY_SIZE")
    for name in ("UDS", "SSL_CERTFILE", "API_KEY", "API_KEY_FILE", "OPERATOR_KEY", "MODELS", "DATA_DIR", "JOURNAL", *kept):
        monkeypatch.setenv(f"CHAIRLIFT_{name}", "cpu")
    names = {f"CHAIRLIFT_{name}" for name in kept}
    ends = f"import os; raise SystemExit({{name for name in os.environ if name.startswith('CHAIRLIFT_')}} != {names})"
    monkeypatch.setattr(servers, "_command", lambda model, port: [sys.executable, "-S", "-c", ends])
    for name in [name for name in os.environ if name.startswith("CHAIRLIFT_") and os.environ[name] != "cpu"]:
        monkeypatch.delenv(name)
    with pytest.raises(ChairliftError, match="status 0"), servers.server_for("other", None, None):
        pass


def launched(tmp_path, monkeypatch, *arguments):
    """The exit status of `launch`, and the arguments and variables of the client that it started."""
    client, out = tmp_path / arguments[0], tmp_path / "out.json"
    client.write_text(CLIENT.format(python=sys.executable, out=str(out)))
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return main.main(["launch", *arguments]), *json.loads(out.read_text())


def test_launch_claude(url, tmp_path, monkeypatch):
    status, arguments, variables = launched(tmp_path, monkeypatch, "claude", "--model", "b", "--", "-p", "hello")
    assert (status, arguments) == (7, ["-p", "hello"])
    assert (variables["ANTHROPIC_BASE_URL"], variables["ANTHROPIC_MODEL"], variables["ANTHROPIC_AUTH_TOKEN"]) == (url, "b", "none")


def test_launch_codex(url, tmp_path, monkeypatch):
    _, arguments, variables = launched(tmp_path, monkeypatch, "codex", "--api-key", "secret", "--url", f"{url}/v1")
    assert f'model_providers.chairlift.base_url="{url}/v1"' in arguments
    assert arguments[-2:] == ["-m", "a"]
    assert "secret" not in arguments
    assert variables["CHAIRLIFT_KEY"] == "secret"


def test_launch_opencode(url, tmp_path, monkeypatch):
    _, _, variables = launched(tmp_path, monkeypatch, "opencode")
    settings = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    assert settings["model"] == "chairlift/a"
    assert settings["provider"]["chairlift"]["options"] == {"baseURL": f"{url}/v1", "apiKey": "none"}


def test_launch_aider(url, tmp_path, monkeypatch):
    _, arguments, variables = launched(tmp_path, monkeypatch, "aider", "--", "--message", "hello")
    assert arguments == ["--model", "openai/a", "--message", "hello"]
    assert (variables["OPENAI_API_BASE"], variables["OPENAI_API_KEY"]) == (f"{url}/v1", "none")


def test_a_client_that_is_not_installed_is_named_before_a_server_starts(url, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main.main(["launch", "claude", "--model", "other"]) == 2
    assert "claude is not installed: npm install -g @anthropic-ai/claude-code" in capsys.readouterr().err


def test_launch_names_the_clients_if_none_is_given(capsys):
    with pytest.raises(SystemExit):
        main.main(["launch"])
    assert "required: {claude,codex,opencode,aider}" in capsys.readouterr().err
