import argparse
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import chairlift
from chairlift.cli import flags, main
from chairlift.cli.config_file import read_config
from chairlift.cli.foreign_flags import HINTS
from chairlift.config import EngineConfig
from chairlift.server.config import ServerConfig
from chairlift.settings import default_in_words, parse_size

HEAVY = {"torch", "transformers", "starlette", "uvicorn", "pydantic", "numpy", "rich", "tokenizers", "jinja2", "huggingface_hub", "msgpack"}


def chairlift_command(*arguments, stdin="", **environ):
    """Runs the command line in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CHAIRLIFT_") or name == "CHAIRLIFT_CACHE_DIR"}
    command = [sys.executable, "-m", "chairlift.cli.main", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=clean | environ, timeout=100, check=False)


@pytest.mark.parametrize("command", ["serve", "list", "show", "rm", "ps", "stop"])
def test_help_imports_nothing_heavy(command):
    call = f"try: main(['{command}', '--help'])\nfinally: print(*sys.modules, file=sys.stderr)"
    requested = f"import sys; from chairlift.cli.main import main\n{call}"
    done = subprocess.run([sys.executable, "-c", requested], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stderr.split()}
    assert "argparse" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag, capsys):
    with pytest.raises(SystemExit) as left:
        main.main([flag])
    assert (left.value.code, capsys.readouterr().out) == (0, f"chairlift {chairlift.__version__}\n")


def test_commands_are_listed_in_groups(capsys):
    assert main.main([]) == 0
    text = capsys.readouterr().out
    for group, commands in main.GROUPS.items():
        listed = text.split(f"\n{group}:\n")[1].split("\n\n")[0]
        assert re.findall(r"^  ([a-z-]+)", listed, re.MULTILINE) == list(commands)


def test_a_closed_standard_output_is_no_failure(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main.main([]) == 0


def test_a_character_that_the_terminal_lacks_is_no_failure(tmp_path, monkeypatch):
    sums = (
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "computed_tokens",
        "compute_seconds",
        "block_seconds",
        "seconds",
        "preemptions",
    )
    record = {**dict.fromkeys(sums, 0), "tenant": "Zoë🦀", "tier": "", "model": ""}
    (tmp_path / "2026-11-22.jsonl").write_text(json.dumps(record) + "\n")
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    assert main.main(["usage", str(tmp_path), "--by", "tenant"]) == 0
    assert "Zoë\\U0001f980".encode("latin-1") in shown.getvalue()


@pytest.mark.parametrize(("arguments", "same"), [(["help"], ["--help"]), (["help", "bench", "serve"], ["bench", "serve", "--help"])])
def test_help_is_a_command(arguments, same, capsys):
    texts = []
    for one in (arguments, same):
        with pytest.raises(SystemExit) as left:
            main.main(one)
        assert left.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_ls_is_list(capsys, tmp_path):
    texts = []
    for name in ("list", "ls"):
        assert main.main([name, "--json", "--cache-dir", str(tmp_path)]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_vllms_flags_mean_the_same():
    given = {
        "-tp": ("2", "tensor_parallel_size", 2),
        "-dp": ("3", "replicas", 3),
        "--data-parallel-size": ("3", "replicas", 3),
        "--download-dir": ("/models", "cache_dir", "/models"),
        "--num-gpu-blocks-override": ("512", "num_kv_blocks", 512),
        "-q": ("fp8", "quantization", "fp8"),
        "--allowed-origins": (
            '["https://a.example", "https://b.example"]',
            "cors_allow_origins",
            ("https://a.example", "https://b.example"),
        ),
        "--tool-call-parser": ("llama3_json", "tool_call_parser", "llama"),
        "--reasoning-parser": ("glm45", "reasoning_parser", "qwen3"),
        "--scheduling-policy": ("priority", "scheduling_policy", "priority"),
        "--generation-config": ("vllm", "generation_config", "none"),
    }
    for flag, (text, name, value) in given.items():
        assert vars(main.build_parser("serve").parse_args(["serve", "--enable-auto-tool-choice", flag, text]))[name] == value, flag


def test_a_hint_names_a_flag_that_exists():
    (commands,) = (action for action in main.build_parser("serve")._actions if isinstance(action, argparse._SubParsersAction))
    known = {flag for action in commands.choices["serve"]._actions for flag in action.option_strings}
    for flag, hint in HINTS.items():
        assert flag not in known
        assert not [word for word in re.findall(r"--[a-z-]+|(?<= )-[a-z]+", hint) if word not in known], flag


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size must be at least 1, got 0 ("),
        (["--pipeline-parallel-size", "2"], "not supported: use --tensor-parallel-size, or --replicas ("),
        (["--max-loras", "4"], "leave it out: only memory limits the number of adapters (--enable-lora) ("),
        (["--quantization", "awq"], "got 'awq': the quantization of a checkpoint is read from its files"),
    ],
)
def test_settings_of_other_servers_that_cannot_work(arguments, says, capsys):
    with pytest.raises(SystemExit) as left:
        main.main(["serve", *arguments])
    assert left.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flag", "default"),
    [
        ("gate", "--max-num-seqs N", "what the upstream reports, else 256"),
        ("gate", "--max-model-len N", "what the upstream reports, else 131072"),
        ("serve", "--max-model-len N", "what the model was made for, less where memory is short"),
        ("launch", "--model MODEL", "the first model of the server, or smollm2-135m-instruct if none runs"),
    ],
)
def test_help_has_the_default_of_the_command(command, flag, default, capsys):
    with pytest.raises(SystemExit):
        main.main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    _, _, described = text.partition(f"{flag} ")
    assert f"(default: {default})" in described.partition(" [CHAIRLIFT_")[0]


def test_join_shows_the_flag_that_it_needs(capsys):
    with pytest.raises(SystemExit):
        main.main(["join", "--help"])
    assert "--engine-secret-file FILE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        (["serve"], "chairlift serve [flags] [[NAME=]MODEL ...]"),
        (["simulate"], "chairlift simulate [flags] [--trace FILE] [--sessions PATH] [MODEL]"),
        (["replay"], "chairlift replay [-h] [--set NAME=VALUE] [--policy NAME] [--json] [--report FILE] FILE"),
    ],
)
def test_the_usage_of_a_command_with_many_flags_is_one_line(command, usage, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main.main([*command, "--help"])
    assert capsys.readouterr().out.splitlines()[:2] == [f"usage: {usage}", ""]


def test_help_fits_a_terminal_of_80_columns_but_for_commands_and_choices(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def parsers(parser):
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for one in action.choices.values():
                    yield from parsers(one)

    lines = [line for parser in parsers(main.build_parser()) for line in parser.format_help().splitlines()]
    whole = re.compile(r"  (chairlift|curl) |  --.*\{.*\}$|  {")
    assert [line for line in lines if len(line) > 80 and not whole.match(line)] == []


def test_defaults_are_told_in_words():
    every = (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig))
    fields = {field.name: default_in_words(field) for field in every if field.metadata}
    expected = {"prefix_cache_disk": "20G", "max_body_size": "2M", "keep_alive": "5m", "preload": "none", "shutdown_timeout": "30 seconds"}
    expected |= {"queue_ageing_ms": "10,000 ms", "enable_prefix_caching": "on", "max_model_len": "", "watermark": "0.05", "swap_space": "0"}
    assert {name: fields[name] for name in expected} == expected
    assert not [name for name, text in fields.items() if "(" in text or re.search(r"\d{5}", text)]


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "pull", "list", "show", "rm", "ps", "stop", "top", "explain", "doctor"])
def test_every_command_explains_itself_by_example(command, capsys):
    with pytest.raises(SystemExit) as left:
        main.main([command, "--help"])
    assert left.value.code == 0
    assert f"chairlift {command}" in capsys.readouterr().out.split("examples:")[1]


def test_every_setting_has_a_flag_and_tells_its_variable(capsys):
    with pytest.raises(SystemExit):
        main.main(["serve", "--help-all"])
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for field in (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig)):
        if field.name == "shared_max_model_len":
            continue
        assert field.name == "model" or f" --{field.name.replace('_', '-')}" in text
        assert f"[CHAIRLIFT_{field.name.upper()}]" in text


@pytest.mark.parametrize(
    ("arguments", "environ", "says"),
    [
        (["ski"], {}, "invalid choice: 'ski'"),
        (["sevre"], {}, "): did you mean serve? ('chairlift --help'"),
        (["bench", "sreve"], {}, "): did you mean serve? ('chairlift bench --help'"),
        (["serve", "--no-such-flag"], {}, "--no-such-flag"),
        (["serve", "--block-size", "x"], {}, "--block-size: expected a whole number, got 'x'"),
        (["serve", "--max-model-len", "many"], {}, "--max-model-len: not a size: 'many'"),
        (["serve", "--device", "abacus"], {}, "--device: expected one of auto, cpu, cuda, got 'abacus'"),
        (["serve", "--max-num-seqs", "0"], {}, "--max-num-seqs must be at least 1, got 0 ('chairlift serve --help'"),
        (
            ["serve", "--max-num-seq", "4"],
            {},
            "unrecognized arguments: --max-num-seq: did you mean --max-num-seqs? ('chairlift serve --help'",
        ),
        (["serve", "--prot=4"], {}, "unrecognized arguments: --prot=4: did you mean --port? ("),
        (["plan", "a", "b"], {}, "unrecognized arguments: b ("),
        (["bench", "serve", "--request-rates", "4"], {}, "--request-rates 4: did you mean --request-rate? ('chairlift bench serve --help'"),
        (["serve"], {"CHAIRLIFT_MAX_NUM_SEQ": "4"}, "unknown variable CHAIRLIFT_MAX_NUM_SEQ: did you mean CHAIRLIFT_MAX_NUM_SEQS? ("),
        (["top"], {"CHAIRLIFT_CLIENT_API_KEYS": "a"}, "did you mean CHAIRLIFT_CLIENT_API_KEY? ("),
        (["serve", "--batch-timeout-ms", "5"], {}, "--batch-timeout-ms needs --batching dynamic"),
        (["serve", "--tenant-weights", "alice"], {}, "--tenant-weights: expected weights like alice=2,bob=1, got 'alice'"),
        (["serve"], {"CHAIRLIFT_PORT": "abc"}, "CHAIRLIFT_PORT: expected a whole number, got 'abc'"),
        (["chat"], {"CHAIRLIFT_ENABLE_PREFIX_CACHING": "maybe"}, "CHAIRLIFT_ENABLE_PREFIX_CACHING: expected true or false"),
        (["generate", "a", "--max-tokens", "ten"], {}, "--max-tokens"),
    ],
)
@pytest.mark.slow
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, environ, says):
    done = chairlift_command(*arguments, **environ)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("chairlift: ")
    assert says in line


def test_without_a_command_the_help_is_shown():
    bare, requested = chairlift_command(), chairlift_command("--help")
    assert (bare.returncode, bare.stderr) == (0, "")
    assert bare.stdout == requested.stdout
    assert "examples:" in bare.stdout


@pytest.mark.parametrize("variable", ["SERVICE_HOST", "SERVICE_PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR", "MODEL_DIR", "BUILD"])
def test_variables_that_resemble_no_setting_are_ignored(variable):
    flags.check_variables({"heeded": [field.name for field in dataclasses.fields(ServerConfig)]}, {f"CHAIRLIFT_{variable}": "a"})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pull", "./no/such/directory"], "no/such/directory"),
        (["generate", "a", "--model", "./no/such/directory"], "no/such/directory"),
        (["serve", "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000"),
    ],
)
@pytest.mark.slow
def test_a_failure_is_one_line_and_exit_code_1(arguments, says):
    done = chairlift_command(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("chairlift: ")
    assert says in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "a", "--max-model-len", "10m"], "--max-model-len 10485760: the model was made for 8192 positions"),
    ],
)
@pytest.mark.slow
def test_a_setting_that_cannot_work_is_one_line_and_exit_code_2(arguments, says):
    done = chairlift_command(*arguments)
    # The first command on a machine says that it reads the default model's tokenizer.
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Reading the tokenizer of ")]
    assert (done.returncode, done.stdout, lines) == (2, "", [f"chairlift: {says}"])


def test_flags_win_over_variables_and_variables_over_defaults(monkeypatch):
    monkeypatch.setenv("CHAIRLIFT_PORT", "1")
    monkeypatch.setenv("CHAIRLIFT_MODEL", "from/variable")
    monkeypatch.setenv("CHAIRLIFT_MAX_MODEL_LEN", "2k")
    monkeypatch.setenv("CHAIRLIFT_ENABLE_PREFIX_CACHING", "off")
    given = vars(main.build_parser().parse_args(["serve", "--port", "2"]))
    assert flags.read(ServerConfig, given).port == 2
    assert flags.read(EngineConfig, given) == EngineConfig(model="from/variable", max_model_len=2048, enable_prefix_caching=False)
    given = vars(main.build_parser().parse_args(["serve", "from/argument", "--enable-prefix-caching", "--max-num-batched-tokens", "1K"]))
    engine = flags.read(EngineConfig, given)
    assert (engine.model, engine.enable_prefix_caching, engine.max_num_batched_tokens) == ("from/argument", True, 1024)


OF_A_SERVER = {"PORT": "abc", "API_KEY": "", "DEVICE": "cuda"}
"""Variables that would change what the commands below do, or end them, if they acted there."""
OF_VARIANTS = {"BATCHING": "dynamic", "STATIC_BATCH_SIZE": "8", "SCHEDULING_POLICY": "priority"}
"""Those of settings for which `compare` has flags of another meaning."""


@pytest.mark.parametrize(
    ("command", "variables"), [(["compare"], OF_A_SERVER | OF_VARIANTS), (["simulate", "--trace", "TRACE"], OF_A_SERVER)]
)
def test_variables_act_only_where_their_command_has_the_flag(command, variables, capsys, monkeypatch, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,64,64\n0.1,64,64\n")
    command = [str(trace) if part == "TRACE" else part for part in command]

    def figures():
        assert main.main([*command, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        return {name: value for name, value in document.items() if name != "wall_s"}

    plain = figures()
    for name, value in variables.items():
        monkeypatch.setenv(f"CHAIRLIFT_{name}", value)
    assert figures() == plain
    monkeypatch.setenv("CHAIRLIFT_MAX_NUM_SEQS", "1")
    assert figures() != plain


def test_help_shows_the_common_flags_and_help_all_the_rest(capsys):
    for flag, hidden in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit) as left:
            main.main(["serve", flag])
        assert left.value.code == 0
        text = capsys.readouterr().out
        shown = re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)
        assert "--max-num-seqs" in shown
        assert ("--queue-ageing-ms" in shown) == hidden
        assert hidden or len(shown) <= 50


@pytest.mark.parametrize(("text", "size"), [("4k", 4096), ("4K", 4096), ("1m", 2**20), ("1M", 2**20), ("1.5GiB", 3 * 2**29), ("7", 7)])
def test_sizes_are_binary_in_lower_and_upper_case(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5km", "5kk", "5B", "k", "5iB", "1e3k", "nan", "-"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(SystemExit):
        main.main(["serve", "--max-model-len", text])


def test_a_config_file_gives_settings_and_flags_and_variables_win(tmp_path, monkeypatch):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: from/file\nport: 1\nmax-num-seqs: 1k\nwatermark: 0.25\ntenant_weights: {alice: 2}\npolicy: fair\nmax_body_size: 7\n"
    )
    monkeypatch.setenv("CHAIRLIFT_MAX_BODY_SIZE", "9")
    args = vars(main.build_parser().parse_args(["serve", "--config", str(file), "--port", "2"]))
    args["file_settings"] = read_config(args)
    server, engine = flags.read(ServerConfig, args), flags.read(EngineConfig, args)
    assert (server.port, server.max_body_size, engine.model, engine.max_num_seqs, engine.watermark) == (2, 9, "from/file", 1024, 0.25)
    assert (engine.tenant_weights, engine.scheduling_policy) == ({"alice": 2}, "fair")


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("api-key: 0123456701234567", {"api_key": "0123456701234567"}),
        ("served-model-name: 1.10", {"served_model_name": "1.10"}),
        ("enable-lora: yes\nlora-modules: [a=/a, b=/b]", {"enable_lora": True, "lora_modules": {"a": "/a", "b": "/b"}}),
        ("lora-modules: {a: /a}", {"lora_modules": {"a": "/a"}}),
        ("preload: [a, b]", {"preload": ("a", "b")}),
        ("speculative-config: {method: off, a: 3}", {"speculative_config": {"method": "off", "a": 3}}),
        ('speculative-config: \'{"method": "ngram"}\'', {"speculative_config": {"method": "ngram"}}),
        ("data-parallel-size: 2", {"replicas": 2}),
        ("\ufeffport: 1", {"port": 1}),
        ("# all commented out", {}),
        ("", {}),
    ],
)
def test_a_config_file_gives_values_as_they_are_written(text, settings, tmp_path):
    (tmp_path / "serve.yaml").write_text(text)
    arguments = vars(main.build_parser("serve").parse_args(["serve", "--config", str(tmp_path / "serve.yaml")]))
    assert read_config(arguments) == settings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-num-seq: 4", "serve.yaml, line 1: unknown setting max-num-seq: did you mean max-num-seqs?"),
        ("# a comment\nport: x", "serve.yaml, line 2: port: expected a whole number"),
        ("port:", "port: it has no value"),
        ("port: [1, 2]", "port: expected one value, got ['1', '2']"),
        ("port: 1\nport: 2", "serve.yaml, line 2: port: it is set twice"),
        ("max_num_seqs: 1\nmax-num-seqs: 2", "max-num-seqs: it is set twice"),
        ("- a", "expected lines like"),
        ("tenant-weights: &a {x: *a}", "tenant-weights: it contains itself"),
        ("host: h\nport: 70000", "serve.yaml, line 2: --port must be at most 65535"),
        ("data-parallel-size: 0", "serve.yaml, line 1: --replicas must be at least 1"),
    ],
)
def test_a_config_file_with_an_error_is_wrong_usage(text, says, tmp_path, capsys):
    (tmp_path / "serve.yaml").write_text(text)
    with pytest.raises(SystemExit) as left:
        main.main(["serve", "--config", str(tmp_path / "serve.yaml")])
    assert left.value.code == 2
    assert says in capsys.readouterr().err


def test_an_error_of_a_flag_names_no_line_of_the_file(tmp_path, capsys):
    (tmp_path / "serve.yaml").write_text("port: 1")
    with pytest.raises(SystemExit):
        main.main(["serve", "--config", str(tmp_path / "serve.yaml"), "--port", "70000"])
    assert "chairlift: --port must be" in capsys.readouterr().err


def test_a_model_is_positional_or_a_flag_but_not_both(capsys):
    for arguments in (["serve", "a/b"], ["serve", "--model", "a/b"], ["plan", "a/b"], ["chat", "--model=a/b"]):
        assert flags.read(EngineConfig, vars(main.build_parser().parse_args(arguments))).model == "a/b"
    with pytest.raises(SystemExit):
        main.build_parser().parse_args(["serve", "a/b", "--model", "c/d"])
    assert "the model is named twice: a/b and c/d" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", " ", "secret "])
def test_a_key_that_guards_nothing_is_refused(key):
    with pytest.raises(ValueError, match="--api-key must not be empty"):
        ServerConfig(api_key=key)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of what a process has loaded")
@pytest.mark.slow
def test_the_servers_process_has_no_threads_that_compute():
    # They would wait by spinning, on the cores that the engine's process computes on.
    code = (
        "import sys, chairlift.cli.serve, chairlift.server.supervisor\n"
        "assert 'torch' not in sys.modules\n"
        "assert not [line for line in open('/proc/self/maps') if 'omp' in line.rpartition('/')[2]]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_gate_takes_larger_bodies_than_a_server():
    limits = [flags.read(ServerConfig, vars(main.build_parser(name).parse_args([name]))).max_body_size for name in ("serve", "gate")]
    assert limits == [2 << 20, 32 << 20]
    given = vars(main.build_parser("gate").parse_args(["gate", "--max-body-size", "1M"]))
    assert flags.read(ServerConfig, given).max_body_size == parse_size("1M")


def test_a_key_for_upstreams_that_no_header_can_carry_is_refused_unquoted(capsys):
    assert main.main(["gate", "--upstream", "http://127.0.0.1:1", "--upstream-api-key", "secret\nx"]) == 2
    error = capsys.readouterr().err
    assert "--upstream-api-key must be one line of printable characters" in error
    assert "secret" not in error


@pytest.mark.parametrize(
    "address", ["http://:80", "http://h:99999", "http://h:0", "http://h:x", "http://[::1", "unix:///run/vllm.sock", "h:80"]
)
def test_an_upstreams_address_that_names_no_server_is_refused(capsys, address):
    with pytest.raises(SystemExit):
        main.build_parser("gate").parse_args(["gate", "--upstream", address])
    assert f"expected an address like http://127.0.0.1:8001, got '{address}'" in capsys.readouterr().err
