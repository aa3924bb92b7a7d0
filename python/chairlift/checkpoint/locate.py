"""Maps a user's model name or path to a directory in Hugging Face's layout."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import shutil
import urllib.parse
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from chairlift.checkpoint.cache import DEFAULT_FILE, LINK, cache_dir, default_file, hub_dir
from chairlift.checkpoint.file_address import find_file
from chairlift.checkpoint.gguf_parts import holds_model, is_gguf, model_files, parts_of, stem_of
from chairlift.checkpoint.hub_cache import repositories
from chairlift.checkpoint.hub_model import find_hub_model
from chairlift.checkpoint.hub_settings import is_offline
from chairlift.checkpoint.hub_suggestions import suggestions
from chairlift.checkpoint.lfs_pointer import remedy
from chairlift.checkpoint.model_name import FileAddress, HubName, parse_name
from chairlift.checkpoint.ollama_store import OllamaFile, OllamaModel, find_ollama_model
from chairlift.checkpoint.progress import Progress, announced, say
from chairlift.checkpoint.regular_files import check_files
from chairlift.checkpoint.weight_files import INDEX, weight_files
from chairlift.config import DEFAULT_MODEL
from chairlift.errors import ChairliftError, ModelNotFound, UnsupportedModel

__all__ = ["cache_dir", "locate", "public_name"]

_LAYOUT = 6
"""Part of the name of a converted model. It is incremented when the output of `convert` changes."""

_LONGEST_STEM = 100
"""Most bytes of a file's name in that of its converted model."""

_FILE_ADDRESS = re.compile(r"file:(//(localhost)?)?(?=/(?!/))", re.IGNORECASE)
"""What stands before the path in the address of a file of this machine."""

_DEFAULT_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""The sampling settings of SmolLM2-Instruct's model card. The GGUF file does not contain them."""


def locate(
    model: str,
    revision: str | None = None,
    directory: str | None = None,
    progress: Progress = True,
    *,
    download: bool = True,
    update: bool = False,
) -> Path:
    """Returns the local directory of a model. Downloads it (with `download`) or converts it first if necessary.

    `model` is DEFAULT_MODEL, a directory with config.json and safetensors files or with GGUF files, a GGUF file, the file:// address of
    one of these, a model of the Hugging Face hub (`organisation/model`, `organisation/model:TAG`) with `revision` as branch, tag or commit,
    the address of a GGUF file, or a model of Ollama's. Models are stored in `directory`, or as `cache_dir` and `hub_dir` say. A downloaded
    model is used if no newer one can be downloaded, unless `update` makes that an error. `progress` says where slow operations are
    reported. Raises ModelNotFound with remedies, UnsupportedModel, or ChairliftError if the disk is full.
    """
    cache = cache_dir(directory)
    path = _model_path(model)
    if model == DEFAULT_MODEL and not path.is_dir():
        default = f"default-{Path(DEFAULT_FILE).stem}-{_LAYOUT}"
        return _converted(lambda: _default(cache, progress, download), cache, default, progress, _DEFAULT_SAMPLING)
    if path.is_dir():
        return _directory(path, cache, progress)
    if path.is_file():
        if not is_gguf(path):
            hint = "name a GGUF file, or the directory that holds config.json"
            raise ModelNotFound(f"{path} is a file but not a GGUF one; {remedy(path, hint)}")
        return _gguf(path, cache, progress)
    name = parse_name(model)
    if isinstance(name, HubName) and revision is not None:
        name = replace(name, revision=revision)
    found = None if name is None else _downloaded(name, directory)
    if found is None and revision is None and (name is None or not update) and (ollama := find_ollama_model(model)) is not None:
        return _ollama(ollama, cache, progress)
    if name is None:
        raise _unknown(model)
    path = _fetched(name, found, directory, progress, download, update)
    return _directory(path, cache, progress) if path.is_dir() else _gguf(path, cache, progress)


def check_name(model: str, revision: str | None = None) -> None:
    """Raises ModelNotFound for a text that is neither a path nor the name of a model. Reads no model and asks no hub."""
    known = model == DEFAULT_MODEL or _model_path(model).exists() or parse_name(model) is not None
    if not known and (revision is not None or find_ollama_model(model) is None):
        raise _unknown(model)


def _unknown(model: str) -> ModelNotFound:
    return ModelNotFound(
        f"there is no model {model!r} here; name a directory with config.json and *.safetensors, a .gguf file or the address of one, "
        f"a model of the Hugging Face hub (organisation/model or organisation/model:Q4_K_M), one of Ollama's, or {DEFAULT_MODEL}"
        + (f"; did you mean {' or '.join(similar)}?" if (similar := suggestions(model)) else "")
    )


def pull_model(model: str, directory: str | None = None, progress: Progress = False) -> Path:
    """Downloads a model as `locate` does, or its newer version; raises ModelNotFound for a name that cannot be downloaded."""
    if model != DEFAULT_MODEL and parse_name(model) is None:
        raise ModelNotFound(f"{model!r} is neither {DEFAULT_MODEL}, a model of the Hugging Face hub (organisation/model) nor an address")
    return locate(model, directory=directory, progress=progress, update=True)


def public_name(model: str) -> str:
    """Returns the name under which clients see a model: the last part of a path or an address, or `model`.

    A file's name is without .gguf and the number of a part.
    """
    path = Path(os.path.abspath(_model_path(model)))
    if not path.exists():
        return _public_address(model) if "://" in model else model
    hub = path.parent.parent.name if path.parent.name == "snapshots" else path.name
    if hub.startswith("models--"):
        return hub.removeprefix("models--").replace("--", "/")  # a directory of the Hugging Face hub's cache
    return stem_of(path) or model


def _model_path(model: str) -> Path:
    """Returns `model`, a path or a file:// address, as a path. A file of a model's directory with safetensors files means the directory."""
    local = _FILE_ADDRESS.match(model)
    path = Path(urllib.parse.unquote(model[local.end() :])) if local else Path(os.path.expanduser(model))
    if path.suffix in (".json", ".safetensors"):
        with contextlib.suppress(ModelNotFound, UnsupportedModel):
            check_files(path.parent.glob("*"))
            config = path.with_name("config.json")
            if config.is_file() and path in (config, path.with_name(INDEX), *weight_files(path.parent)):
                return path.parent
    return path


def _public_address(url: str) -> str:
    name = parse_name(url)
    file = name.file if isinstance(name, HubName) else name and name.name
    return stem_of(PurePosixPath(file)) if file else str(name or url)


def _downloaded(name: HubName | FileAddress, directory: str | None) -> Path | None:
    """Returns the file or the directory of a model that was downloaded."""
    return find_hub_model(name, hub_dir(directory)) if isinstance(name, HubName) else find_file(name, cache_dir(directory))


def _fetched(
    name: HubName | FileAddress, found: Path | None, directory: str | None, progress: Progress, download: bool, update: bool
) -> Path:
    """Returns the file or the directory of a model after downloading what is missing or newer; `found` if that is not possible."""
    offline = isinstance(name, HubName) and is_offline()
    if offline or not download:
        if found is not None:
            return found
        reason = "HF_HUB_OFFLINE allows no request to the Hugging Face hub" if offline else f"'chairlift pull {name}' downloads it"
        raise ModelNotFound(f"{name} is not downloaded: {reason}{_no_path(name)}")
    # These modules import an HTTP client, which a model that is here does not need.
    try:
        if isinstance(name, HubName):
            from chairlift.checkpoint.hub_download import download_hub_model

            return download_hub_model(name, hub_dir(directory), progress)
        from chairlift.checkpoint.file_download import download_file

        return download_file(name, cache_dir(directory), progress)
    except ChairliftError as error:
        if found is None and isinstance(error, ModelNotFound) and (hint := _no_path(name)):
            raise ModelNotFound(f"{error}{hint}") from None
        if found is None or update:
            raise
        say(f"{error}; taking the copy of {name} that was downloaded earlier", progress)
        return found


def _no_path(name: HubName | FileAddress) -> str:
    """Returns what to add to the message about a name of the hub that may be meant as a path."""
    looks_so = isinstance(name, HubName) and (name.repo.lower().endswith(".gguf") or Path(name.repo).parent.is_dir())
    return f"; there is no file or directory {name} here either" if looks_so else ""


def _ollama(model: OllamaModel, cache: Path, progress: Progress) -> Path:
    """Returns the converted directory of a model of Ollama's, and reports what of its manifest is not used."""
    file = model.read()
    if file.unused:
        say(f"Not used of Ollama's {model.name}: {', '.join(file.unused)}. Chats have the template of the GGUF file", progress)
    return _gguf(file.path, cache, progress, file)


def _default(cache: Path, progress: Progress, download: bool) -> Path:
    """Returns the default model's file."""
    if not download and not default_file(cache).is_file():
        raise ModelNotFound(f"{DEFAULT_MODEL} is not in {cache}: 'chairlift pull' downloads it")
    from chairlift.checkpoint.pull import pull_default  # imports an HTTP client

    return pull_default(cache, progress)


def _directory(path: Path, cache: Path, progress: Progress) -> Path:
    """Returns a directory in Hugging Face's layout as it is, else the converted directory of one of its GGUF files.

    Without files of its own, those of its folders count: repositories have a folder for each type of weights.
    """
    check_files(path.glob("*"))
    has_config = (path / "config.json").is_file()
    if has_config and ((path / LINK).is_symlink() or any(path.glob("*.safetensors"))):
        if (path / "adapter_config.json").is_file():
            say(f"{path} also holds a LoRA adapter, which is used only with --lora-modules NAME={path}", progress)
        return path.absolute()
    files = model_files(path.iterdir()) or model_files(path.glob("*/*"))
    check_files(files)
    found = [file for file in files if holds_model(file)] or files
    if found:
        if len(found) > 1:
            others = ", ".join(str(file.relative_to(path)) for file in found[1:])
            say(f"Taking {found[0].relative_to(path)} of {path}, which also holds {others}", progress)
        return _gguf(found[0], cache, progress)
    if has_config:
        return path.absolute()
    repository = next((known for known in repositories(path.parent) if known.path == path), None)
    if repository and (snapshot := find_hub_model(HubName(repository.name), path.parent)):
        return _directory(snapshot, cache, progress) if snapshot.is_dir() else _gguf(snapshot, cache, progress)
    if (path / "adapter_config.json").is_file():
        raise ModelNotFound(f"{path} holds a LoRA adapter: serve the model that it was trained for with --lora-modules NAME={path}")
    raise ModelNotFound(
        f"{path} has no config.json and no GGUF file; a model's directory holds config.json, tokenizer.json and *.safetensors"
    )


def _gguf(path: Path, cache: Path, progress: Progress, ollama: OllamaFile | None = None) -> Path:
    """Returns the converted directory of a file, or of the model of which it is a part.

    Converts again if the file or a tokenizer.json beside it has changed. A link stays one: in the hub's cache, tokenizer.json and other
    parts are beside the link, and not beside the file. The previous directory is then removed. Directories of other layout versions stay,
    because a server of another version may be using them.
    """
    path = parts_of(path.absolute())[0]
    identity = hashlib.sha256()
    for file in (path, path.parent / "tokenizer.json"):
        if file.is_file():
            status = file.stat()
            identity.update(f"\0{file}\0{status.st_size}\0{status.st_mtime_ns}".encode(errors="surrogateescape"))
    location = hashlib.sha256(os.fsencode(path))
    advice = (ollama.sampling, ollama.stop) if ollama else ()
    location.update(repr(advice).encode() if advice else b"")  # several models of Ollama's may have the same file
    stem = os.fsencode(stem_of(path))[:_LONGEST_STEM].decode(errors="ignore")
    name = f"{stem}-{location.hexdigest()[:8]}-{_LAYOUT}"
    out = _converted(lambda: path, cache, f"{name}-{identity.hexdigest()[:8]}", progress, *advice)
    for other in out.parent.glob(f"{glob.escape(name)}-*"):
        if other != out:
            shutil.rmtree(other, ignore_errors=True)
    return out


def _converted(
    source: Callable[[], Path],
    cache: Path,
    name: str,
    progress: Progress,
    sampling: Mapping[str, float] | None = None,
    stop: Collection[str] = (),
) -> Path:
    """Returns the converted directory `name` of the file `source`, created if it is missing.

    `sampling` and `stop` are for `convert`.
    """
    out = cache / "gguf" / name
    if not os.access(out / LINK, os.R_OK):
        from chairlift.checkpoint.gguf import convert  # imports numpy, which a server's process does not need otherwise

        path = source()
        if out.is_dir() and not os.access(out / LINK, os.R_OK):
            shutil.rmtree(out)  # the GGUF file that it links to was moved, or this directory was copied from another user's cache
        with announced(f"Reading the tokenizer of {path.name}", progress):
            convert(path, out, sampling, stop)
    return out
