"""`chairlift join` names the files of this machine; the server names none."""

import pytest

from chairlift.cli import join
from chairlift.cli.main import main
from chairlift.engine.machine_files import OWN


@pytest.fixture
def joined(monkeypatch, tmp_path):
    """Runs the command with these flags; returns the settings that its engine gets."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    seen = []

    async def stand_in(address, secret, files):
        seen.append((address, files.settings))
        return 0

    monkeypatch.setattr(join, "_join", stand_in)

    def run(*flags):
        assert main(["join", "10.0.0.1:7000", "--engine-secret-file", str(secret), *flags]) == 0
        address, settings = seen.pop()
        assert address == ("10.0.0.1", 7000)
        return settings

    return run


def test_without_flags_the_model_is_the_servers_and_no_file_is_named(joined):
    settings = joined()
    assert "model" not in settings
    assert set(settings) == set(OWN)
    assert {settings[name] for name in OWN} == {None, "none", 20 << 30}  # the meter is none, and a directory would have at most 20 GiB


def test_the_flags_name_the_files(joined):
    settings = joined("--model", "/m", "--journal", "/j", "--prefix-cache-dir", "/p", "--enable-lora", "--lora-modules", "a=/a", "b=/b")
    assert (settings["model"], settings["journal"], settings["prefix_cache_dir"]) == ("/m", "/j", "/p")
    assert settings["lora_modules"] == {"a": "/a", "b": "/b"}


def test_a_setting_that_is_the_servers_is_refused(joined, capsys):
    with pytest.raises(SystemExit):
        joined("--max-num-seqs", "4")
    assert "--max-num-seqs" in capsys.readouterr().err
