"""`chairlift top` and `chairlift explain`, against a server that has one answer to each path."""

import base64
import io
import json
import ssl
import struct
import urllib.error
from contextlib import contextmanager
from xml.etree import ElementTree

import pytest
from local_server import Handler, local_server
from rich.console import Console

from chairlift.cli import explain, main, shadow, top
from chairlift.server.lifecycle import ModelState

ROW = {"slot": 2, "tag": 129, "tenant": "alice", "priority": 0, "state": "decode", "prompt_tokens": 500, "computed_tokens": 512}
ROW |= {"output_tokens": 13, "blocks": 33, "age_us": 1_500_000, "request": "cmpl-abc"}
STATE = {
    "model": "org/model",
    "ready": True,
    "state": "ready",
    "restarts": 0,
    "stuck": None,
    "load": {"slots": 0.5, "kv_cache": 0.25, "saturation": 0.95},
    "stats": {"running": 1, "slots": 2, "waiting": 3, "swapped": 1, "waiting_by_state": {"wait_blocks": 1, "swapped": 2}},
    "samples": [{"generation": 1234.4, "prompt": 50.0, "steps": 30.2}],
    "latency": {"window": 60.0, "ttft": {"count": 3, "p50": 0.25, "p90": 1.5, "p99": None}},
    "running": [{**ROW, "slot": 7, "tag": 257, "request": None, "state": "prefill", "computed_tokens": 20}, ROW],
    "waiting": [],
    "kv_map": base64.b64encode(struct.pack("<8I", 0, 1, 1, 2, 3, 5, 5, 9)).decode(),
}
SEQUENCE = {"tag": 129, "states": {"wait_blocks": 1.5, "prefill": 0.25, "decode": 0.25}}
EXPLANATION = {"id": "cmpl-abc", "summary": "Waited 1.50 s: 1.50 s for KV blocks.", "sequences": [SEQUENCE]}


@contextmanager
def answering(answers):
    """A server with `answers` by path; yields its address and the keys that came."""
    keys = []

    class Answer(Handler):
        def do_GET(self):
            keys.append(self.headers.get("authorization"))
            status, body = answers.get(self.path, (404, {"error": {"message": f"nothing is known of {self.path}"}}))
            if status == 302:
                return self.reply(status=status, headers={"location": body})
            return self.reply(body if isinstance(body, bytes) else json.dumps(body).encode(), status)

        def do_POST(self):
            requested = json.loads(self.body())
            text = " | ".join(message["content"] for message in requested["messages"]).upper()
            self.reply()
            for delta in ({"role": "assistant"}, {"content": text}, {"content": f" {requested.get('temperature')}"}):
                self.wfile.write(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

    with local_server(Answer) as url:
        yield url, keys


def test_top_prints_one_picture_where_nobody_could_see_it_move(monkeypatch, capsys):
    monkeypatch.setattr(top, "RATES_SECONDS", 0)
    with answering({"/dashboard/data": (200, STATE)}) as (url, keys):
        assert main.main(["top", "--url", f"{url}/v1", "--api-key", "sk-1"]) == 0
    shown = capsys.readouterr().out
    assert keys == ["Bearer sk-1"] * 2
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0] == "chairlift org/model live 1,234 tokens/s generated 50 tokens/s of prompts 30 steps/s"
    assert [line.split(" ", 2)[2] for line in lines[2:5]] == [
        "50% 1 of 2 running, 4 waiting",
        "25% 12% free, 25% cached, 12% shared, 50% exclusive",
        "95% work that arrived in 10 s, as a share of the capacity",
    ]
    assert "first token 250 ms 1.5 s - swapped 2 preempted: its KV blocks are in host memory" in lines
    assert [line for line in lines if line.startswith(("2 ", "7 "))] == [
        "2 cmpl-abc alice decode 500/500 13 33 1.50 s",
        "7 #257 alice prefill 20/500 13 33 1.50 s",
    ]
    assert "\x1b" not in shown


def test_top_has_a_row_for_each_of_several_models(monkeypatch, capsys):
    monkeypatch.setattr(top, "RATES_SECONDS", 0)
    chat = {"name": "chat", "aliases": ["gpt-4o"], "status": "loaded", "requests": 1, "running": 1, "waiting": 3}
    small = {"name": "small", "aliases": [], "status": "loading", "requests": 2, "running": 0, "waiting": 2}
    memory = {"num_bytes": 98_000_000, "unload_in_seconds": None}
    state = STATE | {"model": "small", "ready": False, "state": "loading", "models": [chat | memory, small | memory]}
    with answering({"/dashboard/data?model=small": (200, state)}) as (url, _):
        assert main.main(["top", "--once", "--url", url, "--model", "small"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("chairlift small the model is loading")
    assert lines[2:5] == [
        "name state memory running waiting unloaded",
        "chat, gpt-4o loaded 98 MB 1 3 not while in use",
        "small loading - 0 2 -",
    ]


def test_top_shows_sessions_by_names_that_nobody_chose_for_a_terminal():
    one = {"tenant": "alice", "turns": 3, "prompt_tokens": 1500, "cached_tokens": 900, "output_tokens": 40}
    one |= {"waited_s": 2.5, "turn_wait_s": 1.25, "compute_s": 0.5, "quiet_s": 12.0}
    names = ["\x1b[31mred", "[red]x[/red]", "n" * 300, "d", "e", "f"]
    console = Console(file=io.StringIO(), force_terminal=True, width=130, height=40, color_system=None)
    console.print(top.frame({**STATE, "sessions": [{"session": name, **one} for name in names]}, console))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert all(len(line) <= 130 for line in lines)
    [first] = [line.split() for line in lines if "?[31mred" in line]
    assert first[1:] == ["alice", "3", "1,500", "60%", "40", "2.50", "s", "1.25", "s", "500.0", "ms", "12.00", "s"]
    assert any(line.startswith("[red]x[/red] ") for line in lines)
    assert [line[0] for line in lines if line.endswith("12.00 s")] == ["?", "[", "n", "d", "e"]


def test_top_has_a_row_for_each_engine_and_each_tier():
    load = {"slots": 0.5, "kv_cache": 0.25, "saturation": 1.0}
    engines = [{"number": 0, "state": "ready", "running": 7, "waiting": 1, "load": load}, {"number": 1, "state": "down"}]
    latency = {"window": 60.0, "ttft": {"count": 2, "p50": 0.5, "p90": 1.0, "p99": 2.0}}
    tier = {"running": 1, "waiting": 70, "latency": latency, "targets": {}}
    shown = STATE | {"replica": 0, "replicas": engines, "tiers": [{"tier": "default", **tier}]}
    console = Console(file=io.StringIO(), width=120)
    console.print(top.frame(shown, console))
    assert "TTFT p50" not in console.file.getvalue(), "only the default tier is in use"
    console.print(top.frame(shown | {"tiers": [{"tier": "default", **tier}, {"tier": "flex", **tier}]}, console))
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "engine 0 ready 7 1 50% 25% 100%" in lines
    assert "engine 1 down - - - - -" in lines
    assert "flex 1 70 500 ms 2 s - -" in lines


def test_a_narrow_terminal_loses_columns_and_no_digits():
    session = {"tenant": "alice", "turns": 3, "prompt_tokens": 1500, "cached_tokens": 900, "output_tokens": 40}
    session |= {"session": "a", "waited_s": 2.5, "turn_wait_s": 1.25, "compute_s": 0.5, "quiet_s": 12.0}
    for width, columns in (
        (60, "session turns prompts cached output waited quiet"),
        (72, "session tenant turns"),
        (120, "for turns compute"),
    ):
        console = Console(file=io.StringIO(), width=width)
        console.print(top.frame(STATE | {"sessions": [session]}, console))
        lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
        assert all(len(line) <= width for line in lines)
        tables = [" ".join(line.split()) for line in lines if not line.startswith(("KV ", "load "))]
        assert not [line for line in tables if "…" in line]
        assert any(columns in line for line in tables), tables
        assert any(line.startswith("2 cmpl-abc alice decode 500/500 13 ") for line in tables)


@pytest.mark.parametrize(("width", "shown"), [(60, False), (90, True), (160, True)])
def test_cache_misses_fit_into_any_terminal(width, shown):
    session = {"tenant": "alice", "turns": 3, "prompt_tokens": 1500, "cached_tokens": 900, "output_tokens": 40}
    session |= {"session": "a", "waited_s": 2.5, "turn_wait_s": 1.25, "compute_s": 0.5, "quiet_s": 12.0}
    misses = [
        {"reason": f"template_rewrote_history{n}", "turns": 9 - n, "tokens": 1234, "what": "w" * 90, "advice": "a" * 90} for n in range(6)
    ]
    console = Console(file=io.StringIO(), width=width)
    missed = [session | {"missed_for": {"evicted": 10, "template_rewrote_history": 1990}}, session | {"missed_for": {}}]
    console.print(top.frame(STATE | {"sessions": missed, "cache_misses": misses}, console))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert all(len(line) <= width for line in lines)
    assert [line.split()[:3] for line in lines if line.startswith("template")] == [
        [f"template_rewrote_history{n}", str(9 - n), "1,234"] for n in range(4)
    ]
    assert any(line.endswith("2,000 template_rewrote_history") for line in lines) == shown


@pytest.mark.parametrize("name", [state.value for state in ModelState])
def test_top_has_words_for_all_states_of_a_model(name):
    console = Console(file=io.StringIO(), width=120)
    console.print(top.frame(STATE | {"state": name}, console))


@pytest.mark.parametrize(("width", "height", "rows"), [(76, 20, 5), (200, 60, 40)])
def test_a_picture_is_as_large_as_the_terminal(width, height, rows):
    crowd = [{**ROW, "slot": i, "request": "a-name-of-a-request-that-somebody-made-very-long" * 2} for i in range(40)]
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    console.print(top.frame({**STATE, "running": crowd}, console))
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert sum("a-name" in line for line in lines) == rows
    assert any(f"and {40 - rows} more" in line for line in lines) == (rows < 40)


def test_top_of_a_server_that_has_seen_nothing(monkeypatch, capsys):
    nothing = {
        **STATE,
        "ready": False,
        "state": "starting",
        "stats": {},
        "samples": [],
        "latency": {"window": None},
        "running": [],
        "kv_map": "",
    }
    with answering({"/dashboard/data": (200, nothing)}) as (url, keys):
        assert main.main(["top", "--once", "--url", url]) == 0
    assert keys == [None]
    shown = capsys.readouterr().out
    assert "the model is loading" in shown
    assert "none" in shown


def test_explain_is_plain_text_in_a_pipe(capsys):
    with answering({"/v1/requests/mine%20and/1/explain": (200, EXPLANATION)}) as (url, _):
        assert main.main(["explain", "mine and/1", "--url", url]) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines == [
        EXPLANATION["summary"],
        "",
        "1,500.0 ms wait_blocks waits for free KV blocks",
        "250.0 ms prefill computes its prompt, alone in the step",
        "250.0 ms decode generates its output",
    ]
    assert "█" not in shown


def test_explain_draws_the_time_in_each_state(tmp_path, capsys):
    file = tmp_path / "time.svg"
    other = {"tag": 130, "states": {"wait_blocks": 0.5, "decode": 1.0, "of another version": 0.5}}
    with answering({"/v1/requests/x/explain": (200, {**EXPLANATION, "sequences": [SEQUENCE, other]})}) as (url, _):
        assert main.main(["explain", "x", "--url", url, "--output", str(file)]) == 0
    bars = [one.attrib for one in ElementTree.parse(file).getroot() if len(one)]
    assert [(bar["y"], round(float(bar["width"]))) for bar in bars[:3]] == [(bars[0]["y"], 615), (bars[0]["y"], 102), (bars[0]["y"], 102)]
    assert sum(float(bar["width"]) for bar in bars[3:]) == pytest.approx(820)
    assert "wait_blocks: 1.50 s · 500.0 ms — waits for free KV blocks" in file.read_text()


def test_explain_lists_who_started_before_the_request(capsys):
    served = {"served_before": {"tier": 20, "fit": 1}, "served_first": [[3, "alice", "tier"], [4, "", "fit"]]}
    answer = {**EXPLANATION, "sequences": [SEQUENCE | served]}
    with answering({"/v1/requests/x/explain": (200, answer)}) as (url, _):
        assert main.main(["explain", "x", "--url", url]) == 0
    *_, heading, first, second = capsys.readouterr().out.splitlines()
    assert heading == "started before it, the first 2 of 21:"
    assert first == "  request 3 of tenant alice, of a more urgent tier"
    assert second == "  request 4, that fitted into the free KV blocks while it did not"


def test_explain_draws_bars_to_one_scale_in_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    other = {"tag": 130, "states": {"decode": 1.0}}
    explain.show({**EXPLANATION, "sequences": [SEQUENCE, other]}, console)
    bars = [line for line in console.file.getvalue().splitlines() if line.startswith("██")]
    assert [line.count("█") for line in bars] == [80, 40]


def test_every_part_of_a_bar_is_seen_and_none_goes_beyond_the_whole():
    text = explain.bar([("red", 0.0001), ("green", 1.0), ("blue", 0.0001)], 1.0002, 10)
    assert len(text) == 10
    assert (text.spans[0].start, text.spans[0].end) == (0, 1)


@pytest.mark.parametrize(
    ("answer", "reported"),
    [
        ((404, {"error": {"message": "no request 'x' is known"}}), "chairlift: no request 'x' is known\n"),
        (
            (401, {"error": {"message": "No API key"}}),
            "chairlift: the server requires an API key: set it with --api-key or CHAIRLIFT_CLIENT_API_KEY\n",
        ),
        ((502, b"<html>a proxy</html>"), "chairlift: the server returned status 502\n"),
    ],
)
def test_what_the_server_says_is_passed_on(answer, reported, capsys):
    with answering({"/v1/requests/x/explain": answer}) as (url, _):
        assert main.main(["explain", "x", "--url", url]) == 1
    assert capsys.readouterr().err == reported


@pytest.mark.parametrize(
    ("url", "reported"), [("http://127.0.0.1:1", "no chairlift server at"), ("localhost:8000", "--url localhost:8000: expected")]
)
def test_a_server_that_is_not_there(url, reported, capsys):
    assert main.main(["top", "--once", "--url", url]) == 1
    assert reported in capsys.readouterr().err


def test_a_certificate_that_is_not_trusted(monkeypatch, capsys):
    untrusted = ssl.SSLCertVerificationError("self-signed")
    untrusted.verify_message = "self-signed certificate"
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: (_ for _ in ()).throw(urllib.error.URLError(untrusted)))
    assert main.main(["explain", "x", "--url", "https://localhost:1"]) == 1
    assert "not trusted (self-signed certificate): if it is your own, set the variable SSL_CERT_FILE to its path" in capsys.readouterr().err


def test_something_else_that_listens_there_is_not_taken_for_a_server(capsys):
    with answering({"/dashboard/data": (200, b"<html>hello</html>")}) as (url, _):
        assert main.main(["top", "--once", "--url", url]) == 1
    assert "no chairlift server at" in capsys.readouterr().err


def test_states_of_another_version_are_shown_by_their_names(capsys):
    sequence = {"tag": 1, "states": {"wait_slots": 0.5, "wait_for_godot": 0.25}}
    explain.show({"summary": "Waited.", "sequences": [sequence]}, Console())
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "250.0 ms wait_for_godot a state that this version does not know" in shown
    state = STATE | {"stats": STATE["stats"] | {"waiting_by_state": {"wait_for_godot": 3}}}
    Console(width=120).print(top.frame(state, Console(width=120)))
    assert "wait_for_godot" in capsys.readouterr().out


def test_the_reason_of_a_wait_is_cut_after_its_name_and_number(capsys):
    state = STATE | {"stats": STATE["stats"] | {"waiting_by_state": {"wait_slots": 3}}}
    Console(width=top.PIPED_WIDTH).print(top.frame(state, Console(width=top.PIPED_WIDTH)))
    shown = " ".join(capsys.readouterr().out.split())
    assert "waiting requests meaning first token" in shown
    assert "wait_slots 3 waits for a batch slot" in shown


def test_texts_of_clients_control_no_terminal(capsys):
    miss = {"before": "a\x1b]0;title\x07", "now": "b\x1b[2J[bold]", "advice": "keep it"}
    explain.show({"summary": "Done.", "sequences": [], "cache_miss": miss}, Console())
    assert capsys.readouterr().out == "Done.\n  before: a?]0;title?\n  now: b?[2J[bold]\n  advice: keep it\n"
    runs = {
        "shadow": dict.fromkeys(
            (
                "requests",
                "ttft_p50_s",
                "ttft_p99_s",
                "time_per_output_token_p50_s",
                "time_per_output_token_p99_s",
                "cached_share",
                "preemptions",
            )
        )
    }
    empty = {"runs": runs, "tenants": {}, "sessions": {"a\x1b[2J": runs, "b": runs}}
    text = shadow.text({**empty, "covered": None, "window_s": 1, "cpu_share": 0.0, "proposal": None, "failure": None})
    assert "a?[2J" in text
    assert "\x1b" not in text


def test_a_refusal_has_no_sequences(capsys):
    explain.show({"summary": "Refused with status 503 (queue_full): full", "sequences": []}, Console())
    assert capsys.readouterr().out == "Refused with status 503 (queue_full): full\n"


COMMANDS = [["top", "--once", "--url"], ["explain", "x", "--url"], ["bench", "serve", "--num-prompts", "1", "--model", "m", "--base-url"]]
LIST = "alice=K1,bob=K2"
ASKED = {"/dashboard/data": (401, {}), "/v1/requests/x/explain": (401, {}), "/v1/models": (401, {})}


@pytest.fixture
def environ(monkeypatch):
    monkeypatch.delenv("CHAIRLIFT_API_KEY", raising=False)
    monkeypatch.delenv("CHAIRLIFT_CLIENT_API_KEY", raising=False)
    return monkeypatch


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("server_keys", [LIST, "K1"])
def test_clients_do_not_send_the_keys_of_a_server(command, server_keys, environ):
    environ.setenv("CHAIRLIFT_API_KEY", server_keys)
    with answering(ASKED) as (url, keys):
        assert main.main([*command, url]) == 1
    assert keys
    assert set(keys) == {None}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_clients_send_the_key_of_their_variable_or_flag(command, environ):
    environ.setenv("CHAIRLIFT_CLIENT_API_KEY", "K3")
    with answering(ASKED) as (url, keys):
        main.main([*command, url])
        assert set(keys) == {"Bearer K3"}
        keys.clear()
        main.main([*command, url, "--api-key", "K4="])
        assert set(keys) == {"Bearer K4="}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("key", [LIST, "alice=K1", "K1,K2"])
@pytest.mark.parametrize("source", ["--api-key", "CHAIRLIFT_CLIENT_API_KEY"])
def test_a_client_refuses_a_list_of_keys(command, key, source, environ, capsys):
    with answering(ASKED) as (url, keys):
        if source == "--api-key":
            command = [*command, url, source, key]
        else:
            environ.setenv(source, key)
            command = [*command, url]
        assert main.main(command) == 2
    assert keys == []
    reported = capsys.readouterr().err
    assert reported.startswith(f"chairlift: {source} is a list of tenants' keys")
    assert reported.count("\n") == 1
    assert "K1" not in reported


def test_a_redirect_to_another_server_does_not_get_the_key(environ):
    path = "/v1/requests/x/explain"
    with answering({path: (200, EXPLANATION)}) as (other, theirs), answering({path: (302, other + path)}) as (url, ours):
        assert main.main(["explain", "x", "--url", url, "--api-key", "K1"]) == 0
    assert (ours, theirs) == (["Bearer K1"], [None])


def test_chat_with_a_running_server(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n/reset\nthree\n"))
    with answering({"/v1/models": (200, {"data": [{"id": "m"}]})}) as (url, _):
        assert main.main(["chat", "--url", url, "--system", "be brief", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "BE BRIEF | ONE 0.0",
        "BE BRIEF | ONE | BE BRIEF | ONE 0.0 | TWO 0.0",
        "BE BRIEF | THREE 0.0",
    ]


def test_chat_with_a_server_that_is_not_there(capsys):
    assert main.main(["chat", "--url", "http://127.0.0.1:1"]) == 1
    assert "no chairlift server at" in capsys.readouterr().err
