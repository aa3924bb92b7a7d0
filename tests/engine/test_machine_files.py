"""An engine that has joined another machine's server uses no path that a frame names."""

import io
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.config import DEFAULT_MODEL, EngineConfig
from chairlift.engine.frames import Abort, AdapterChanged, Failed, Load, LoadAdapter, Pulse, UnloadAdapter, receive, send
from chairlift.engine.join_settings import JoinSettings, read_join_settings
from chairlift.engine.journal import Journal
from chairlift.engine.machine_files import OWN, MachineFiles, without_files
from chairlift.engine.parent import Parent
from chairlift.engine.seal import Seal, Seals
from chairlift.errors import EngineDead, InvalidSetting

TEXTS = [item.name for item in fields(EngineConfig) if "choices" not in item.metadata and ("str" in item.type or "Mapping" in item.type)]
"""The settings that may have a path: any text."""
NO_FILES = {"model", "revision", "tenant_weights", "tier_weights", "speculative_config"}
"""Those that are no path here: names, and mappings of names to numbers or names."""
OWN_FILES = MachineFiles({"model": "/own/model", "lora_modules": {"a": "/own/a"}, "prefix_cache_dir": "/own/cache"})


@pytest.fixture
def opened(monkeypatch):
    """The paths that this process opens, from any thread and library."""
    seen: list[str] = []
    current[:] = [seen]
    yield seen
    current.clear()


current: list[list[str]] = []
sys.addaudithook(lambda event, arguments: [seen.append(str(arguments[0])) for seen in current if event == "open"] and None)


def test_each_setting_that_may_name_a_file_is_the_machines_own():
    assert set(TEXTS) - NO_FILES == set(OWN) - {"prefix_cache_disk"}


def load(**settings):
    return Load({**asdict(EngineConfig()), **settings})


PATHS = st.sampled_from(["/canary", "canary/canary", "../canary", "~/canary", "./canary", "canary.gguf", "powercap:/canary", "canary\0"])


@given(st.fixed_dictionaries({name: PATHS for name in OWN if name not in ("lora_modules", "prefix_cache_disk")} | {"model": PATHS}))
def test_no_path_of_a_frame_is_left(settings):
    config = EngineConfig(**OWN_FILES.own(load(**settings)).settings)
    assert "canary" not in repr(config)
    assert (config.model, config.journal, config.prefix_cache_dir) == ("/own/model", None, "/own/cache")


@given(st.dictionaries(st.text(max_size=9), PATHS, max_size=3))
def test_adapters_are_those_that_the_machine_has_named(modules):
    frame = load(enable_lora=True, lora_modules={"a": "/canary", **modules})
    if modules.keys() <= {"a"}:
        assert OWN_FILES.own(frame).settings["lora_modules"] == {"a": "/own/a"}
    else:
        with pytest.raises(InvalidSetting, match="start join with --lora-modules NAME=PATH there"):
            OWN_FILES.own(frame)
    assert OWN_FILES.own(LoadAdapter(1, "a", "/canary")) == LoadAdapter(1, "a", "/own/a")
    with pytest.raises(InvalidSetting, match="has not named the adapter 'b'"):
        OWN_FILES.own(LoadAdapter(1, "b", "/canary"))


@pytest.mark.parametrize(
    "model", ["/canary", "tiny", "./a/b", "../a", "a/b/c", "", None, 5, "~", "C:\\canary", "here/model", "tiny:1b", "https://a.b/c.gguf"]
)
def test_a_model_that_has_no_public_name_must_be_named_here(model, tmp_path, monkeypatch):
    (tmp_path / "here" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)  # there the name "here/model" is a path too
    with pytest.raises(InvalidSetting, match="start join with --model on the engine's machine"):
        MachineFiles({}).own(load(model=model))


@pytest.mark.parametrize("model", [DEFAULT_MODEL, "organisation/model-1.5", "hf.co/organisation/model:Q4_K_M"])
def test_a_model_is_fetched_by_its_name(model):
    assert MachineFiles({}).own(load(model=model, revision="refs/pr/1")).settings["model"] == model


@pytest.mark.parametrize("revision", ["../../canary", "/canary", "a/../b", "", "a//b", ".git", 5])
def test_a_revision_is_no_path(revision):
    with pytest.raises(InvalidSetting, match="no name of a branch"):
        OWN_FILES.own(load(revision=revision))


def test_the_server_sends_no_path(tmp_path):
    (tmp_path / "tiny").mkdir()
    settings = {name: str(tmp_path) for name in OWN if name not in ("lora_modules", "prefix_cache_disk")}
    sent = without_files(load(enable_lora=True, model=str(tmp_path / "tiny"), lora_modules={"a": str(tmp_path)}, **settings))
    assert str(tmp_path) not in repr(sent)
    assert (sent.settings["model"], sent.settings["lora_modules"]) == ("tiny", {"a": ""})
    assert EngineConfig(**OWN_FILES.own(sent).settings).model == "/own/model"
    assert without_files(LoadAdapter(1, "a", "/b")) == LoadAdapter(1, "a", "")


def test_each_engine_has_a_journal_of_its_own(tmp_path):
    """Ray's engines and those of several `join`s name the same file, at the same time and after a restart."""
    path = tmp_path / "day.journal"

    def journal():
        process = MachineFiles({"model": "/own/model", "journal": str(path)})  # each engine has a process
        [one] = {process.own(load(journal="/canary")).settings["journal"] for _ in range(2)}
        return one

    with ThreadPoolExecutor(4) as threads:
        paths = list(threads.map(lambda _: journal(), range(12)))
    assert set(paths) == {str(path), *(f"{path}.{number}" for number in range(1, 12))}
    for one in paths:
        file = Journal(one)
        file.append(one.encode(), flush=False)
        file.close()
    assert journal() == f"{path}.12"
    assert [Path(one).read_text() for one in paths] == paths
    assert {one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {0o600}


def test_a_journal_that_cannot_be_created_is_one_clear_line(tmp_path):
    with pytest.raises(InvalidSetting, match=r"--journal .*/none/journal: cannot write there \(No such file"):
        MachineFiles({"model": "/own/model", "journal": str(tmp_path / "none" / "journal")}).own(load())


def test_a_frame_with_paths_opens_no_file_and_is_refused(opened, tmp_path):
    """The process's own intake, from sealed bytes to what its engines get."""
    ours, theirs = socket.socketpair()
    to, back, inbox = Seal(b"1" * 32), Seal(b"2" * 32), SimpleQueue()
    joined = JoinSettings((b"2" * 32, b"1" * 32), MachineFiles({}))
    thread = threading.Thread(target=Parent(theirs, joined=joined).receive_into, args=(inbox,))
    with ours, theirs, ours.makefile("rb") as file:
        thread.start()
        canary = str(tmp_path / "canary")
        for frame in (load(model=canary, journal=canary), load(lora_modules={"a": canary}), LoadAdapter(7, "a", canary)):
            send(ours, frame, 3, to)
        replies = [receive(file, back) for _ in range(3)]
        assert [(number, type(frame)) for number, frame in replies] == [(3, Failed), (3, Failed), (3, AdapterChanged)]
        assert replies[2][1].ask == 7
        assert {frame.error for _, frame in replies} == {"InvalidSetting"}
        others = [load(journal=canary, prefix_cache_dir=canary), Pulse(), Abort([1]), UnloadAdapter(1, "a")]
        for frame in others:
            send(ours, frame, 3, to)
        received = [inbox.get() for _ in range(3)]
        assert received[1:] == [(3, others[2]), (3, others[3])]  # a pulse reaches no engine
        assert canary not in repr(received)
        assert not [path for path in opened if "canary" in path]
        ours.sendall(b"garbage" * 10)
        assert "changed on its way" in str(inbox.get())
        thread.join()


def test_a_process_reads_what_it_is_told():
    joined = JoinSettings((b"1" * 32, b"2" * 32), OWN_FILES)
    read = read_join_settings(io.BytesIO(joined.encode()))
    assert (read.keys, read.files.settings) == (joined.keys, OWN_FILES.settings)
    assert isinstance(read.seals(), Seals)
    for cut in (b"", joined.encode()[:-1], b"\xc1", b"\x01"):
        with pytest.raises(EngineDead):
            read_join_settings(io.BytesIO(cut))
