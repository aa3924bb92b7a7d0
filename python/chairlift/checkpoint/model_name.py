"""Parses the names of models that are not paths: those of the Hugging Face hub, and addresses of files."""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass

from chairlift.checkpoint.hub_settings import endpoint
from chairlift.errors import ModelNotFound

_WORD = r"(?!\.)[\w.-]+"
_NAME = re.compile(
    rf"(?:(?:hf|huggingface):(?://)?|(?:hf\.co|huggingface\.co)/(?=.*/))?(?P<repo>{_WORD}/{_WORD})"
    r"(?:@(?P<revision>\w[\w.-]*))?(?::(?P<tag>[\w.-]+)|/(?P<file>.+\.gguf))?",
    re.ASCII | re.IGNORECASE,
)
_TYPE = re.compile(r"i?q[1-8]_\w+|[bt]?fp?(16|32)|mxfp4\w*", re.ASCII | re.IGNORECASE)
"""Types of weights, which LM Studio writes where other programs have a revision."""
_REVISION = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub: a repository, the types of weights of one of its GGUF files or that file's path, and a revision."""

    repo: str
    tag: str | None = None
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}/{self.file}" if self.file else f"{self.repo}:{self.tag}" if self.tag else self.repo


@dataclass(frozen=True, slots=True)
class FileAddress:
    """The address of a GGUF file, and its name there."""

    url: str
    name: str

    def __str__(self) -> str:
        return shown(self.url)


def shown(model: str) -> str:
    """Returns a name, or an address without what may be secret in it: user, password and query."""
    if "://" not in model:
        return model
    parts = urllib.parse.urlsplit(model)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def parse_name(model: str) -> HubName | FileAddress | None:
    """Returns what a name means: `[hf.co/]org/repo`, with `:TAG` or `/FILE.gguf`, or an address; None for another name, such as a path.

    `hf://` and `hf:` may stand for `hf.co/`, a tag may be the name of a file, and `@REVISION` may follow the repository; LM Studio writes a
    tag there.

    Raises ModelNotFound for an address that cannot be used.
    """
    if re.match(r"https?://", model, re.IGNORECASE):
        try:
            return _address(model)
        except ValueError as error:
            raise ModelNotFound(f"the address of the model is not valid: {error}") from None
    match = _NAME.fullmatch(model)
    return _named(match, match["file"], match["revision"]) if match else None


def is_hub_name(model: str) -> bool:
    """Whether `model` has the form of a name on the hub."""
    return _NAME.fullmatch(model) is not None


def is_revision(text: str) -> bool:
    """Whether `text` may name a branch, a tag or a commit; a path that leaves a folder does not."""
    return _REVISION.fullmatch(text) is not None


def _named(match: re.Match[str], file: str | None = None, revision: str | None = None) -> HubName:
    tag = re.sub(r"\.gguf$", "", match["tag"] or "", flags=re.IGNORECASE)
    if revision is not None and not tag and file is None and _TYPE.fullmatch(revision):
        tag, revision = revision, None
    return HubName(match["repo"], None if tag in ("", "latest") else tag, file, revision)  # Ollama's clients add `latest`


def _address(url: str) -> HubName | FileAddress:
    parts = urllib.parse.urlsplit(url)
    hub = urllib.parse.urlsplit(endpoint())
    if parts.hostname in _HUB_HOSTS or parts[:2] == hub[:2]:
        return _hub_page(parts.path.removeprefix(hub.path if parts[:2] == hub[:2] else ""))
    if parts.username is not None:
        raise ModelNotFound("the address of a model must have no user and no password")
    if parts.scheme != "https" and parts.hostname not in _LOCAL_HOSTS:
        raise ModelNotFound("an address of another machine must begin with https://, so that nobody can change the file on its way")
    name = urllib.parse.unquote(parts.path).rpartition("/")[2]
    if name in ("", ".", "..") or not name.isprintable():
        raise ModelNotFound("the address names no file: it must end in the name of a GGUF file")
    return FileAddress(url, name)


def _hub_page(path: str) -> HubName:
    """Returns the model of a page or a file of the hub: /org/repo, /org/repo/tree/REVISION, /org/repo/resolve/REVISION/FILE."""
    org, repo, *rest = [urllib.parse.unquote(part) for part in path.strip("/").split("/")] + [""]
    rest = [part for part in rest if part]
    match = _NAME.fullmatch(f"{org}/{repo}")
    if match is None or (rest and rest[0] not in ("tree", "blob", "resolve", "raw")) or len(rest) == 1:
        raise ModelNotFound(f"{path:.200} is no page of a model: copy the address of the model's page, or of a GGUF file in it")
    revision, file = (rest[1], "/".join(rest[2:])) if rest else (None, "")
    if file and (rest[0] == "tree" or not file.lower().endswith(".gguf")):
        raise ModelNotFound(f"{path:.200} is no GGUF file: name the model as {match['repo']}, or one of its .gguf files")
    return _named(match, file or None, revision)
