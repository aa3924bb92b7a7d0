"""Makes the wheel of `chairlift-cpu` from that of `chairlift`: the same files, without the dependencies that only torch's code needs.

Usage: python packaging/cpu_wheel.py DIST/chairlift-*.whl; the new wheel is written beside the old one. Needs only the standard library.
"""

import base64
import hashlib
import re
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

NAME = "chairlift-cpu"
LEFT_OUT = {"accelerate", "torch", "transformers", "triton"}
"""The dependencies that are left out."""
EXTRAS = {"fleet", "gate", "gguf", "otel", "png"}
"""The extras that need none of them."""


def cpu_wheel(wheel: Path) -> Path:
    """Writes the wheel of chairlift-cpu and returns its path."""
    distribution, version, tags = wheel.name.split("-", 2)
    new = NAME.replace("-", "_")
    out = wheel.with_name(f"{new}-{version}-{tags}")
    old_info, new_info = (f"{name}-{version}.dist-info/" for name in (distribution, new))
    record = []
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            if entry.filename == f"{old_info}RECORD":
                continue
            data = source.read(entry)
            if entry.filename == f"{old_info}METADATA":
                data = metadata(data.decode()).encode()
            entry.filename = entry.filename.replace(old_info, new_info)
            target.writestr(entry, data, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{entry.filename},sha256={digest},{len(data)}\n")
        target.writestr(f"{new_info}RECORD", "".join([*record, f"{new_info}RECORD,,\n"]))
    return out


def metadata(text: str) -> str:
    """The METADATA file of chairlift-cpu, from that of chairlift."""
    message = HeaderParser().parsestr(text)
    fields = [(name, value) for name, value in message.items() if _belongs(name, value)]
    lines = [f"{name}: {NAME if name == 'Name' else value}\n" for name, value in fields]
    return "".join(lines) + "\n" + message.get_payload()


def _belongs(name: str, value: str) -> bool:
    """Whether a field is chairlift-cpu's too."""
    if name == "Provides-Extra":
        return value in EXTRAS
    if name != "Requires-Dist":
        return True
    extra = re.search(r"extra *== *['\"]([\w-]+)['\"]", value)
    return extra[1] in EXTRAS if extra else package_name(value) not in LEFT_OUT


def package_name(requirement: str) -> str:
    """The package of a requirement like `torch>=2.8; platform_system == 'Linux'`."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(cpu_wheel(Path(path)))
