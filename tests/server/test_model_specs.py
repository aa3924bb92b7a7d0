"""Which models a server has: the command line and the file of --models."""

import pytest

from chairlift.config import EngineConfig
from chairlift.engine.engine_process import EngineProcess
from chairlift.engine.replicated_engine import ReplicatedEngine
from chairlift.errors import InvalidSetting
from chairlift.server.config import ServerConfig
from chairlift.server.lifecycle import ModelState
from chairlift.server.model_specs import named_models, read_models, single_model
from chairlift.server.supervisor import served_models

GOOD = """
[chat]
path = "org/chat"
aliases = ["gpt-4o", "default"]
keep_alive = "1h"
priority = -1
weight = 3
max-model-len = "4k"
tool_call_parser = "mistral"

["org/small"]
path = "./small.gguf"
preload = true
enable_prefix_caching = false
"""


def read(tmp_path, text, **server):
    file = tmp_path / "models.toml"
    file.write_text("\ufeff" + text)  # some editors begin a file so
    return read_models(str(file), EngineConfig(max_num_seqs=3), ServerConfig(**server))


def test_a_file_has_a_table_for_each_model(tmp_path):
    chat, small = read(tmp_path, GOOD)
    assert (chat.name, chat.aliases, chat.keep_alive, chat.priority, chat.preload) == ("chat", ("gpt-4o", "default"), 3600, -1, False)
    assert (chat.weight, small.weight) == (3, 1)
    assert (chat.config.model, chat.config.max_model_len, chat.config.max_num_seqs) == ("org/chat", 4096, 3)
    assert (chat.tool_call_parser, small.tool_call_parser) == ("mistral", "auto")
    assert (small.name, small.keep_alive, small.preload, small.config.enable_prefix_caching) == ("org/small", None, True, False)


def test_a_table_has_lists_and_tables_of_a_setting(tmp_path):
    text = 'path = "a"\nenable-lora = true\nlora-modules = ["sql=/adapters/sql"]\nspeculative-config = {method = "ngram"}\n'
    [spec] = read(tmp_path, f"[a]\n{text}download-dir = '/cache'\n")
    assert (spec.config.lora_modules, spec.config.speculative_config) == ({"sql": "/adapters/sql"}, {"method": "ngram"})
    assert spec.config.cache_dir == "/cache"


def test_a_context_length_on_the_command_line_is_for_all_models(tmp_path):
    common = EngineConfig(max_model_len=8192)
    specs = named_models(["a=./a", "b=./b"], common, ServerConfig())
    assert [spec.config.for_positions(512).max_model_len for spec in specs] == [None, None]
    assert [spec.config.for_positions(8192).max_model_len for spec in specs] == [8192, 8192]
    file = tmp_path / "models.toml"
    file.write_text(GOOD)
    chat, small = read_models(str(file), common, ServerConfig())
    # What a table or the only model of a server sets is not changed, and refused when the model is loaded.
    assert (chat.config.for_positions(512).max_model_len, small.config.for_positions(512).max_model_len) == (4096, None)
    assert single_model("./a", common, ServerConfig()).config.for_positions(512).max_model_len == 8192


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max-model-len", "max-model-lem", "line 8: [chat] max-model-lem: no such setting: did you mean max_model_len?"),
        ('"4k"', '"much"', "line 8: [chat] max-model-len: not a size: 'much'"),
        ('"1h"', '"soon"', "line 5: [chat] keep_alive: not a duration: 'soon'"),
        ('"1h"', "true", "line 5: [chat] keep_alive: not a duration: 'true'"),
        ('["gpt-4o", "default"]', '"gpt-4o"', "line 4: [chat] aliases: expected a list of names"),
        ("-1", "1.5", "line 6: [chat] priority: expected a whole number"),
        ("= 3", "= 0", "line 7: [chat] weight: expected a whole number from 1 to 1000, got 0"),
        ('"mistral"', '"misty"', "line 9: [chat] tool_call_parser: expected one of"),
        ("max-model-len", "max_model_len = 2\nmax-model-len", "line 9: [chat] max-model-len: it is set twice"),
        ("max-model-len", "revision = 1.10 #", "line 8: [chat] revision: expected text in quotes, got 1.1"),
        ("true", '"yes"', "line 13: [org/small] preload: expected true or false, got 'yes'"),
        ('path = "org/chat"', "", 'line 2: [chat]: it needs path = "..."'),
        ('"default"', '"org/small"', "line 11: two models have the name 'org/small'"),
        ('path = "org/chat"', 'path = ""', "line 3: [chat] path: expected a directory"),
        ("[chat]\n", "[chat\n", "it is not TOML: Expected ']'"),
        ("[chat]\n", "top = 1\n[chat]\n", "line 2: top is outside a table"),
        (
            "max-model-len",
            "max-num-batched-tokens = 2 #",
            "line 8: [chat] max-num-batched-tokens: --max-num-batched-tokens (2) must be at least",
        ),
        ("max-model-len", "max_num_seqs = 0 #", "line 8: [chat] max_num_seqs: --max-num-seqs must be at least 1, got 0"),
        ("max-model-len", "static_batch_size = 4 #", "line 8: [chat] static_batch_size: --static-batch-size needs --batching static"),
        ("preload = true", 'journal = "j"\n[c]\npath = "c"\njournal = "j"', "line 16: [c] journal: two models have the journal j"),
        ("[chat]\n", 'line = {path = "a", weight = 0}\n[chat]\n', "line 2: [line] weight: expected a whole number"),
        ("preload = true", '["org/small".tenant_weights]\na = 0', "line 13: [org/small] tenant_weights: "),
    ],
)
def test_an_error_names_the_line_and_the_key(tmp_path, old, new, message):
    with pytest.raises(InvalidSetting) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert message in str(caught.value)
    assert "models.toml" in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff", b""])
def test_a_file_that_is_no_use_is_refused(tmp_path, content):
    file = tmp_path / "models.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidSetting, match=r"models\.toml: it "):
        read_models(str(file), EngineConfig(), ServerConfig())


def test_the_command_line_names_models(tmp_path):
    (tmp_path / "x=y").mkdir()
    texts = ["org/a", "b=org/b", "gpt-4o=org/a", str(tmp_path / "x=y")]
    a, b, odd = named_models(texts, EngineConfig(), ServerConfig(preload=("b",), keep_alive=7))
    assert (a.name, a.aliases, a.config.model, a.keep_alive, a.preload) == ("org/a", ("gpt-4o",), "org/a", 7, False)
    assert (b.name, b.keep_alive, b.preload) == ("b", None, True)
    assert (odd.name, odd.config.model) == ("x=y", texts[-1])


@pytest.mark.parametrize(
    ("texts", "server", "message"),
    [
        (["a=org/a", "a=org/b"], {}, "two models have the name 'a'"),
        (["=org/a", "b"], {}, "expected NAME=MODEL"),
        (["chat=org/a", "b=org/b"], {"preload": ("chatt",)}, "--preload: there is no model 'chatt': did you mean chat?"),
        (["a=org/a", "b=org/b"], {"preload": ("all",), "max_loaded_models": 1}, "2 models are preloaded, more than --max-loaded-models 1"),
    ],
)
def test_names_that_do_not_fit_together_are_refused(texts, server, message):
    with pytest.raises(InvalidSetting) as caught:
        named_models(texts, EngineConfig(), ServerConfig(**server))
    assert message in str(caught.value)


def test_two_models_share_no_journal():
    with pytest.raises(InvalidSetting, match="two models have the journal day"):
        named_models(["org/a", "org/b"], EngineConfig(journal="day"), ServerConfig())


def test_one_model_stays_loaded():
    spec = single_model("mine=org/a", EngineConfig(), ServerConfig(keep_alive=1))
    assert (spec.name, spec.config.model, spec.keep_alive, spec.preload) == ("mine", "org/a", None, True)
    assert single_model("org/a", EngineConfig(), ServerConfig(served_model_name="other")).name == "other"
    with pytest.raises(InvalidSetting, match="--max-loaded-models is for several models"):
        single_model("org/a", EngineConfig(), ServerConfig(max_loaded_models=1))


def test_an_only_model_starts_with_the_server_also_under_several_names():
    """Requests before it is ready are refused then, and start no second engine."""
    states = []
    for texts in (["a=org/one", "b=org/one"], ["a=org/one", "b=org/two"]):
        specs = named_models(texts, EngineConfig(), ServerConfig())
        models = served_models(specs, [ReplicatedEngine(spec.config, [EngineProcess()]) for spec in specs], ServerConfig())
        states.append([model.lifecycle.state for model in models])
    assert states == [[ModelState.STARTING], [ModelState.UNLOADED, ModelState.UNLOADED]]
