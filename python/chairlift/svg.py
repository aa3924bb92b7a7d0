"""Pictures as SVG and PNG."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from chairlift.errors import InvalidSetting, pip_install, writing

PNG_SCALE = 1.5
"""Pixels of a PNG for each unit of its SVG."""


class Svg(str):
    """The text of an SVG file. A notebook shows it as a picture."""

    __slots__ = ()

    def png(self) -> bytes:
        """The picture as PNG. Raises InvalidSetting without the packages of the extra `png`."""
        try:
            draw, fonts = import_module("resvg_py").svg_to_bytes, import_module("font_roboto").font_files
        except ImportError:
            raise InvalidSetting(f"a PNG needs two packages: {pip_install('png')}; or name a file that ends in .svg") from None
        # A machine may have no font: the package's is used for text in a family that is not installed.
        family = {"font_files": list(fonts.values()), "font_family": "Roboto", "sans_serif_family": "Roboto"}
        return bytes(draw(svg_string=str(self), zoom=PNG_SCALE, **family))

    def write(self, path: str | Path) -> None:
        """Writes the picture, as PNG if the name ends in .png. Raises InvalidSetting if it cannot."""
        data = self.png() if str(path).endswith(".png") else self.encode()
        with writing(path):
            Path(path).write_bytes(data)

    def _repr_svg_(self) -> str:
        return str(self)
