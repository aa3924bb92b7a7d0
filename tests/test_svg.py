"""Pictures are written as SVG, and as PNG with the extra `png`."""

import sys
from types import SimpleNamespace

import pytest

from chairlift.cli.main import main
from chairlift.errors import InvalidSetting
from chairlift.svg import Svg

RED = Svg('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 40 20"><rect width="40" height="20" fill="#f00"/></svg>')
TRACE = "arrival_s,prompt_tokens,output_tokens\n0,50,10\n1,50,10\n"


@pytest.fixture
def without_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)


def test_a_name_chooses_the_format(tmp_path, monkeypatch):
    drawn = []

    def draw(svg_string, **settings):
        drawn.append((svg_string, settings["font_files"]))
        return b"\x89PNG of it"

    monkeypatch.setitem(sys.modules, "resvg_py", SimpleNamespace(svg_to_bytes=draw))
    monkeypatch.setitem(sys.modules, "font_roboto", SimpleNamespace(font_files={"Roboto": "Roboto.ttf"}))
    RED.write(tmp_path / "red.svg")
    assert (tmp_path / "red.svg").read_text() == RED
    assert not drawn
    RED.write(tmp_path / "red.png")
    assert (tmp_path / "red.png").read_bytes() == b"\x89PNG of it"
    assert drawn == [(RED, ["Roboto.ttf"])]
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    report = tmp_path / "report.png"
    assert main(["simulate", "--trace", str(trace), "--model", "SmolLM2-135M", "--report", str(report)]) == 0
    assert report.read_bytes() == b"\x89PNG of it"
    assert "TTFT" in drawn[-1][0]
    with pytest.raises(InvalidSetting, match="cannot be written"):
        RED.write(tmp_path / "none" / "red.svg")


@pytest.mark.usefixtures("without_packages")
def test_without_the_packages_a_png_is_refused_before_the_work(tmp_path, capsys):
    with pytest.raises(InvalidSetting, match=r"pip install 'chairlift\[png\]'; or name a file that ends in \.svg"):
        RED.write(tmp_path / "red.png")
    with pytest.raises(SystemExit):
        main(["simulate", "--trace", "there-is-no-trace.csv", "--report", str(tmp_path / "report.png")])
    assert "pip install 'chairlift[png]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_png_is_drawn():
    reason = "needs the extra png"
    pytest.importorskip("resvg_py", reason=reason)
    pytest.importorskip("font_roboto", reason=reason)
    data = RED.png()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (60, 30)
