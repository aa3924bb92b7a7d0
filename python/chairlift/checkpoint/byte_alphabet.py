"""GPT-2's alphabet for bytes."""

from __future__ import annotations


def _characters() -> tuple[str, ...]:
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in visible else next(others)) for byte in range(256))


BYTE_CHARACTERS = _characters()
"""The character of each byte: visible Latin-1 characters stand for themselves, the other bytes are 256 and up."""
BYTES = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
