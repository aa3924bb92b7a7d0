import itertools
import re
from xml.etree import ElementTree

import pytest

from chairlift.bench.figures import Figures, Goodput
from chairlift.bench.record import Record, Run
from chairlift.bench.report import serving, sweep
from chairlift.bench.report.page import Page
from chairlift.bench.report.plot import Axis, Curve, Plot, cdf, duration, thinned
from chairlift.bench.sweep import Point


def run(scale=1.0, count=50, failures=1):
    records = [
        Record(i / 10, i / 10, i / 10, [i / 10 + scale * t for t in (0.1, 0.2, 0.25)], i / 10 + scale * 0.25, 10, 3) for i in range(count)
    ]
    records += [Record(1.0, 1.0, 1.0, end=1.0, failure="HTTP 429") for _ in range(failures)]
    return Run(records, {"server": "<b>somewhere</b>"}, notes=["A note & more."])


def drawings(html):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.S)]


def test_plots_alone_are_one_svg(tmp_path):
    page = serving.page({"a & b": run(), "other": run(2.0)})
    page.write(tmp_path / "plots.svg")
    text = (tmp_path / "plots.svg").read_text()
    root = ElementTree.fromstring(text)
    inner = [one for one in root if one.tag.endswith("svg")]
    assert len(inner) == len(drawings(page.html()))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    boxes = [[float(one.attrib[name]) for name in ("x", "y", "width", "height")] for one in inner]
    assert all(x + across < width and y + down < height for x, y, across, down in boxes)
    for (x, y, across, down), (other_x, other_y, _, _) in itertools.combinations(boxes, 2):
        assert other_x >= x + across or other_y >= y + down or other_x < x, "drawings overlap"
    assert "a &amp; b" in text
    assert not re.search(r"var\(|src=|url\(", text)
    assert len({box[1] for box in boxes}) == len(boxes) // 2, "two of them side by side"


def test_a_page_needs_nothing_but_itself_and_says_what_happened():
    html = serving.page({"one run": run()}, Goodput.parse(["ttft:150"])).html()
    assert not re.search(r"https?://|src=|<link|@import|url\(", html)
    assert len(html) < 100_000
    assert len(drawings(html)) == 8
    for reported in (
        "50 of 51 requests succeeded",
        "98.0% of all requests met the targets: TTFT ≤ 150 ms",
        "HTTP 429",
        "A note &amp; more.",
    ):
        assert reported in html
    assert "<b>somewhere" not in html
    assert "&lt;b&gt;somewhere&lt;/b&gt;" in html


def test_a_long_run_makes_no_longer_page():
    assert len(serving.page({"a": run(count=5000)}).html()) < 150_000


def test_runs_side_by_side_share_plots():
    html = serving.page({"slow": run(2.0), "quick": run()}).html()
    assert len(drawings(html)) == 8
    first = re.search(r"<figure>.*?</figure>", html, re.S).group()
    assert first.count("<title>") == 2
    assert 'class="key"><i class="c0"' in first
    assert 'class="key"><i class="c1"' in first


def test_a_run_where_nothing_succeeded_has_a_page():
    html = serving.page({"a": run(count=0, failures=3)}).html()
    assert "None of 3 requests succeeded." in html
    drawings(html)


def test_a_sweep_shows_its_knee():
    goodput = Goodput.parse(["ttft:150"])
    points = [Point(rate, one := run(rate / 2, failures=0), Figures(one.records, goodput), rate < 3) for rate in (1.0, 2.0, 4.0)]
    html = sweep.page(points, {}, goodput, closed=False).html()
    assert "The largest load that met the targets (TTFT ≤ 150 ms) is 2 requests a second." in html
    assert '<tr class="highlighted"><td>2</td>' in html
    assert len(drawings(html)) == 4
    assert "At 2: A note &amp; more." in html
    assert "No load met the targets" in sweep.page(points[2:], {}, goodput, closed=True).html()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (2.5e-6, "2.5 µs"), (0.0123456, "12.3 ms"), (0.5, "500 ms"), (1.0, "1 s"), (72.25, "72.25 s"), (3600.0, "3,600 s")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def ticks(plot):
    """Places and texts below the x axis."""
    texts = [node for node in ElementTree.fromstring(plot.svg()).iter("text") if node.get("y") == "272"]
    return [(float(node.get("x")), node.text) for node in texts]


def test_axes_have_round_numbers_and_points_their_place():
    plot = Plot("", "", Axis("x"), Axis("y"), [Curve("c", [0, 5, 10], [0, 1, 2])])
    assert [text for _, text in ticks(plot)] == ["0", "2", "4", "6", "8", "10"]
    assert 'd="M62.0 256.0L297.0 134.0L532.0 12.0"' in plot.svg()
    times = Plot("", "", Axis("x", "s", log=True), Axis("y", "%"), [cdf("c", (0.02, 0.2, 2.0))])
    assert [text for _, text in ticks(times)] == ["20 ms", "50 ms", "100 ms", "200 ms", "500 ms", "1 s", "2 s"]
    assert times.curves[0].ys == pytest.approx([1 / 3, 2 / 3, 1])
    places = [x for x, _ in ticks(times)]
    assert (places[0], places[3], places[-1]) == pytest.approx((62, 297, 532), abs=0.1)


@pytest.mark.parametrize("values", [[1.0], [0.0], [5.0, 5.0], [1e-9, 1e9], [-3.0, 4.0]])
@pytest.mark.parametrize("log", [False, True])
def test_odd_values_can_be_drawn(values, log):
    places = [
        float(n)
        for n in re.findall(
            r"[\d.]+",
            re.search(
                r' d="(M[^"]*)"/></g>', Plot("", "", Axis("x", log=log), Axis("y", log=log), [Curve("c", values, values)]).svg()
            ).group(1),
        )
    ]
    assert all(0 <= place <= 560 for place in places)


def test_a_peak_is_not_lost_when_points_are_left_out():
    ys = [0.0] * 100_000
    ys[77_777] = 9.0
    points = thinned(Curve("c", range(100_000), ys))
    assert len(points) <= 700
    assert (77_777, 9.0) in points
    assert points[0] == (0, 0.0)
    assert points[-1] == (99_999, 0.0)
    assert points == sorted(points)


def test_text_of_a_page_is_escaped():
    page = Page("<t>", "<s>")
    page.heading("<h>")
    page.facts({"<f>": "<v>"})
    page.table(["<a>"], [["<b>"]])
    page.words({"<w>": "<m>"})
    assert not re.search(r"<(t|s|h|f|v|a|b|w|m)>", page.html().replace("<b>&lt;", ""))
