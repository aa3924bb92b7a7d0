"""The download of llama.cpp's tree for `make files`, which needs no network here: the index is on this machine."""

import hashlib
import importlib.util
import io
import tarfile
from pathlib import Path

import pytest
from local_server import Handler, local_server


def load():
    spec = importlib.util.spec_from_file_location("sdist", Path(__file__).with_name("sdist.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packed(name):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member, text in ((f"{name}/llama.cpp/models/one.txt", b"one"), (f"{name}/llama.cpp/other/two.txt", b"two")):
            info = tarfile.TarInfo(member)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    return buffer.getvalue()


@pytest.mark.parametrize("sound", [True, False])
def test_the_tree_is_downloaded_once_and_compared_with_its_digest(tmp_path, monkeypatch, sound):
    sdist = load()
    archive = packed(sdist.NAME.removesuffix(".tar.gz"))
    asked = []

    class Index(Handler):
        def do_GET(self):
            asked.append(self.path)
            page = f'<a href="../../files/{sdist.NAME}">it</a>'.encode()
            content = archive if self.path.startswith("/files/") else page
            self.reply(content, headers={"Content-Length": str(len(content))})

    monkeypatch.setattr(sdist, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(sdist, "SIZE", len(archive))
    monkeypatch.setattr(sdist, "SHA256", hashlib.sha256(archive if sound else b"another").hexdigest())
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with local_server(Index) as url:
        monkeypatch.setenv("PIP_INDEX_URL", f"{url}/simple/")
        if not sound:
            with pytest.raises(SystemExit, match="SHA-256 differs"):
                sdist.unpack("models/")
            return
        for _ in range(2):
            tree = sdist.unpack("models/")
    assert [path.name for path in tree.rglob("*.txt")] == ["one.txt"]
    assert asked == [f"/simple/{sdist.PACKAGE}/", f"/files/{sdist.NAME}"]
