"""The Grafana dashboard and the alerts: each of their queries, with the metrics of a server that has worked."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedEngine
from server_here import serving, wait_until

BOARD = json.loads((Path(__file__).parents[3] / "docs" / "grafana" / "chairlift.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
[ALERTS] = yaml.safe_load((Path(__file__).parents[3] / "docker" / "alerts.yml").read_text())["groups"]
CONDITIONS = [rule["expr"] for rule in ALERTS["rules"] if "chairlift_" in rule["expr"]]
USED = {"waiting": 1, "running": 2, "requests": 3, "prompt_tokens": 4, "cached_tokens": 1, "output_tokens": 5, "computed_tokens": 9}
USED |= {"block_us": 10, "compute_ns": 3, "energy_uj": 2, "preemptions": 1, "queued_us": 7, "held": 1, "held_block_us": 2}


def working(base, engine, http):
    """Lets the server do some of everything."""
    for key in ("steps", "prompt_tokens", "generated_tokens", "computed_tokens", "recomputed_tokens", "prefix_queries", "prefix_hits"):
        engine.counters[key] = engine.counters.get(key, 0) + 5
    for kind in ("recompute", "swap"):
        engine.counters[f"preemptions_{kind}"] = engine.counters.get(f"preemptions_{kind}", 0) + 1
    grown = engine.counters.get("tenants", {}).get("alice", USED)
    grown = {key: value + 1 for key, value in grown.items()}
    engine.counters |= {"tenants": {"alice": grown}, "classes": {0: grown}, "running": 2, "slots": 4, "waiting_by_state": {"wait_slots": 1}}
    http.post(f"{base}/v1/completions", json={"prompt": "a b", "max_tokens": 4})


@pytest.fixture
def scraped():
    engine = ScriptedEngine()
    with serving(engine) as (base, _), httpx.Client() as http:
        working(base, engine, http)
        yield base, engine, http


def test_every_metric_and_label_of_every_query_is_there(scraped):
    base, _, http = scraped
    labels = {}
    for family in text_string_to_metric_families(http.get(f"{base}/metrics").text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    assert len(QUERIES) > 50
    assert len(CONDITIONS) == len(ALERTS["rules"]) - 1  # all but `up`, which is Prometheus' own
    for query in [*QUERIES, *CONDITIONS, BOARD["templating"]["list"][1]["definition"]]:
        names = re.findall(r"chairlift_\w+", query)
        assert names, query
        for name in names:
            assert name in labels, query
            requested = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
            requested |= set(re.findall(r"(\w+)=~?\"", query))
            assert requested - {"instance"} <= labels[name], query  # Prometheus adds the instance
    for panel in PANELS:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"] or f", {label})" in target["expr"], panel["title"]


def test_panels_do_not_overlap_and_have_names_of_their_own():
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    cells = [
        (x, y)
        for panel in BOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")
@pytest.mark.slow
def test_prometheus_scrapes_the_server_and_answers_every_query(scraped, tmp_path):
    base, engine, http = scraped
    target = base.removeprefix("http://")
    settings = {
        "global": {"scrape_interval": "250ms"},
        "scrape_configs": [{"job_name": "chairlift", "static_configs": [{"targets": [target]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    flags = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data", "--web.listen-address=127.0.0.1:0"]
    with (tmp_path / "log").open("w") as log:
        prometheus = subprocess.Popen(["prometheus", *flags], stderr=log, stdout=log)
    try:

        def address():
            found = re.search(r"(?:address|Listening on).*?(127\.0\.0\.1:[1-9]\d*)", (tmp_path / "log").read_text())
            return found and found[1]

        wait_until(address)
        wait_until(lambda: http.get(f"http://{address()}/-/ready").status_code == 200)  # it listens before it answers
        api = f"http://{address()}/api/v1/query"

        def ask(query):
            query = query.replace("$__rate_interval", "60s").replace("$model_name", ".*")
            answer = http.get(api, params={"query": query})
            assert answer.status_code == 200, (query, answer.text)
            return [float(one["value"][1]) for one in answer.json()["data"]["result"]]

        def twice():
            working(base, engine, http)
            return ask("sum(rate(chairlift_generation_tokens_total[60s]))") not in ([], [0.0])

        wait_until(twice, 40)
        for query in QUERIES:
            assert ask(query), query
        for condition in CONDITIONS:
            # An alert is a comparison, which is empty while it is false: ask for each side of it.
            sides = [side for side in condition.split(" > ") if "chairlift_" in side]
            assert sides
            assert all(ask(side) for side in sides), condition
        assert max(ask('up{job="chairlift"}')) == 1
    finally:
        prometheus.terminate()
        prometheus.wait(20)
