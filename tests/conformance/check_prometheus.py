"""Prometheus and promtool, Debian's or any other on the PATH."""

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import pytest

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="no prometheus and promtool: apt-get install prometheus"
)

CONFIG = """
global:
  scrape_interval: 1s
scrape_configs:
  - job_name: chairlift
    authorization: {{credentials: {key}}}
    static_configs:
      - targets: ["{target}"]
"""


@pytest.fixture(scope="module", autouse=True)
def version(record_testsuite_property):
    reported = subprocess.run(["promtool", "--version"], capture_output=True, text=True).stdout
    record_testsuite_property("version", reported.split("version ")[1].split()[0].rstrip(","))


def ask(quick, key, path, body=None):
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(quick + path, data=body and json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def test_promtool_finds_nothing_wrong_with_the_metrics(quick, key):
    ask(quick, key, "/v1/completions", {"prompt": "Once", "max_tokens": 4})
    checked = subprocess.run(["promtool", "check", "metrics"], input=ask(quick, key, "/metrics"), capture_output=True, timeout=60)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


@pytest.fixture
def prometheus(tmp_path, quick, key):
    """Asks a Prometheus that scrapes the server each second; it has done so for 10 s."""
    config = tmp_path / "prometheus.yml"
    config.write_text(CONFIG.format(key=key, target=quick.removeprefix("http://")))
    assert subprocess.run(["promtool", "check", "config", config], capture_output=True).returncode == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def query(expression):
        requested = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(requested, timeout=10) as answer:
            return json.load(answer)["data"]["result"]

    def scraped():
        try:
            return int(query("count_over_time(up[1m])")[0]["value"][1])
        except (OSError, IndexError):
            return 0

    flags = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with subprocess.Popen(["prometheus", *flags, "--log.level=error"]) as process:
        try:
            done = threading.Event()

            def load():
                while not done.wait(0.2):
                    ask(quick, key, "/v1/completions", {"prompt": "Once", "max_tokens": 16})

            loading = threading.Thread(target=load)
            loading.start()
            patience = time.monotonic() + 120
            while scraped() < 10:
                assert time.monotonic() < patience
                time.sleep(0.5)
            done.set()
            loading.join()
            yield query
        finally:
            done.set()
            process.terminate()


def test_prometheus_scrapes_the_server(prometheus):
    assert [float(sample["value"][1]) for sample in prometheus("min_over_time(up[1m])")] == [1]
    assert float(prometheus("scrape_samples_scraped")[0]["value"][1]) > 50
    assert float(prometheus("sum(rate(chairlift_generation_tokens_total[30s]))")[0]["value"][1]) > 0
    for histogram in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        [quantile] = prometheus(f"histogram_quantile(0.9, sum by (le) (rate(chairlift_{histogram}_bucket[30s])))")
        assert 0 < float(quantile["value"][1]) < 60
