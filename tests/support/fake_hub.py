"""A Hugging Face hub on this machine: its API and redirects on one port, the content of large files on another."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from local_server import Handler, local_server

LARGE = 100
"""Files from this size on are stored elsewhere, as with git LFS."""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class FakeRepository:
    """A repository with one commit, of the branch main and the tag v1."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    gated: bool = False
    private: bool = False
    entries: list[Any] = field(default_factory=list)
    """More entries of the list of files."""
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Fields of entries that are not those of the files."""

    def tree(self) -> list[Any]:
        return [self.entry(path) | self.listed.get(path, {}) for path in sorted(self.files)] + self.entries

    def entry(self, path: str) -> dict[str, Any]:
        content = self.files[path]
        entry = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}
        return entry | ({"lfs": {"oid": sha256(content), "size": len(content), "pointerSize": 130}} if len(content) >= LARGE else {})


@dataclass
class FakeHub:
    """The repositories, what goes wrong, and the requests that came."""

    repositories: dict[str, FakeRepository] = field(default_factory=dict)
    url: str = ""
    content_url: str = ""
    members: tuple[str, ...] = ("member",)
    """Tokens of accounts that may read private and gated repositories."""
    accounts: tuple[str, ...] = ("member", "stranger")
    page: int = 1000
    """Entries of a page of the list of files."""
    next_page: str = ""
    """The address of the next page, if it is not the hub's own."""
    faults: list[tuple[str, int, dict[str, str]]] = field(default_factory=list)
    """Answers to the next requests: a part of the path, the status, and headers."""
    cuts: list[int] = field(default_factory=list)
    """Bytes after which the next downloads of large files break."""
    resumes: bool = True
    compares_versions: bool = True
    """Whether If-Range is obeyed."""
    sent: dict[str, bytes] = field(default_factory=dict)
    """Content of large files that is sent instead of theirs, by path."""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """`hub` or `content`, the path, and the headers in lower case."""
    files: dict[str, tuple[bytes, str | None]] = field(default_factory=dict)
    """Files of the content's server beside the hub's: content and ETag by path."""
    _lock: Any = field(default_factory=threading.Lock)

    def add(self, name: str, files: dict[str, bytes], **settings: Any) -> FakeRepository:
        self.repositories[name] = FakeRepository(files, **settings)
        return self.repositories[name]

    def fault(self, path: str) -> tuple[int, dict[str, str]] | None:
        """The fault that the next request has, if any."""
        with self._lock:
            for fault in self.faults:
                if fault[0] in path:
                    self.faults.remove(fault)
                    return fault[1:]
        return None

    def downloads(self) -> list[str]:
        """The last parts of the paths of large files that were requested."""
        return [path.rpartition("/")[2] for server, path, _ in self.requests if server == "content"]


class _Handler(Handler):
    hub: FakeHub
    server_name: str

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.server_name, path, {name.lower(): value for name, value in self.headers.items()}))
        if (fault := self.hub.fault(self.path)) is not None:
            self.answer(*fault)
        elif self.server_name == "content":
            self.content(path)
        else:
            self.api(path)

    def api(self, path: str) -> None:
        match = re.fullmatch(r"/api/models/(?P<repo>[^/]+/[^/]+)/(?P<route>refs|revision|tree)/?(?P<rest>.*)", path)
        match = match or re.fullmatch(r"/(?P<repo>[^/]+/[^/]+)/(?P<route>resolve)/(?P<rest>.*)", path)
        repository = self.hub.repositories.get(match["repo"]) if match else None
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.accounts:
            return self.answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        if match is None or repository is None or (repository.private and token not in self.hub.members):
            return self.answer(404 if token else 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        revision, _, file = match["rest"].partition("/")
        if match["route"] != "refs" and revision not in ("main", "v1", repository.commit, repository.commit[:7]):
            return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        if match["route"] == "refs":
            return self.json({"branches": [{"name": "main", "ref": "refs/heads/main", "targetCommit": repository.commit}], "tags": []})
        if match["route"] == "revision":
            return self.json({"id": match["repo"], "sha": repository.commit})
        if match["route"] == "tree":
            return self.tree(repository)
        return self.resolve(repository, file, token)

    def tree(self, repository: FakeRepository) -> None:
        start = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        entries = repository.tree()
        following = self.hub.next_page or f"{self.hub.url}{urlsplit(self.path).path}?recursive=true&cursor={start + self.hub.page}"
        more = start + self.hub.page < len(entries)
        self.json(entries[start : start + self.hub.page], {"Link": f'<{following}>; rel="next"'} if more else {})

    def resolve(self, repository: FakeRepository, file: str, token: str) -> None:
        if repository.gated and token not in self.hub.members:
            return self.answer(403 if token else 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model is restricted"})
        if file not in repository.files:
            return self.answer(404, {"X-Error-Code": "EntryNotFound"})
        content = repository.files[file]
        if len(content) < LARGE:
            return self.answer(200, {"X-Repo-Commit": repository.commit}, self.hub.sent.get(file, content))
        place = f"/cdn/{sha256(content)}/{file}"
        self.hub.files[place] = self.hub.sent.get(file, content), f'"{sha256(content)[:32]}"'
        linked = {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content)), "X-Repo-Commit": repository.commit}
        return self.answer(302, {"Location": f"{self.hub.content_url}{place}?signature=secret", **linked})

    def content(self, path: str) -> None:
        if path not in self.hub.files:
            return self.answer(404, {})
        content, etag = self.hub.files[path]
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) if self.hub.resumes else None
        same = not self.hub.compares_versions or self.headers.get("If-Range") in (None, etag)
        start = int(wanted[1]) if wanted and same else 0
        if start >= len(content) > 0:
            return self.answer(416, {})
        headers = {"ETag": etag} if etag else {}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.hub.cuts.pop(0) if self.hub.cuts else None
        return self.answer(206 if start else 200, headers, content[start:], cut)

    def json(self, document: Any, headers: dict[str, str] | None = None) -> None:
        self.answer(200, {"Content-Type": "application/json", **(headers or {})}, json.dumps(document).encode())

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"", cut: int | None = None) -> None:
        """Answers with the beginning of `body`, up to `cut`."""
        self.reply(body[:cut], status, {"Content-Length": str(len(body)), **headers})


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Runs a hub without repositories until the end of the block."""
    hub = FakeHub()
    with (
        local_server(type("Content", (_Handler,), {"hub": hub, "server_name": "content"})) as hub.content_url,
        local_server(type("Api", (_Handler,), {"hub": hub, "server_name": "hub"})) as hub.url,
    ):
        yield hub
