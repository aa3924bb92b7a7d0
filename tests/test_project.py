"""The files with which others build, run and publish the project: Dockerfile, compose.yaml, the source distribution, URLs."""

import importlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from chairlift.cli.config_file import read_config
from chairlift.cli.main import build_parser
from chairlift.server.app import routes
from chairlift.server.config import ServerConfig

ROOT = Path(__file__).parent.parent
URL = "https://forge.example/team/chairlift"


def test_compose_mounts_files_that_exist_and_publishes_on_loopback_only():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert {"chairlift", "prometheus", "grafana"} == set(services)
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                assert (ROOT / volume.split(":")[0]).exists(), volume
    assert "API_KEY" in str(services["chairlift"]["environment"])
    [scrape] = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text())["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["chairlift:8000"]}]
    target = services["chairlift"]["build"]["target"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.MULTILINE)[-1] == target


def test_the_build_context_of_the_image_is_a_whole_crate(tmp_path):
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in allowed:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("target", "*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run(["cargo", "metadata", "--locked", "--offline", "--format-version=1"], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "python/chairlift/kernels/rms_norm.py").is_file()


def test_the_lock_files_of_the_image_have_what_the_project_needs(monkeypatch):
    """`make lock` renews them after a change of the dependencies."""
    monkeypatch.syspath_prepend(ROOT / "packaging")
    for name, needed in importlib.import_module("lock").requirements().items():
        text = (ROOT / f"packaging/{name}.lock").read_text()
        locked = dict(re.findall(r"^([\w.-]+)==([\w.]+)(?: ; [^\n]*)? \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE))
        assert len(locked) == len(re.findall(r"^[\w.-]+==", text, re.MULTILINE))
        for one in map(Requirement, needed):
            assert locked[one.name] in one.specifier, f"{name}.lock: {one}"


def test_the_image_installs_only_what_is_locked():
    dockerfile = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install ([^&\n]*)", dockerfile)
    assert len(installs) == 5
    for install in installs:
        assert "--no-deps /wheels/" in install or re.search(r"--require-hashes --requirement /?packaging/\w+\.lock", install), install


@pytest.mark.parametrize("status", [200, 503])
def test_the_images_health_check_asks_the_admin_socket(tmp_path, status):
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(r"ENV .*CHAIRLIFT_ADMIN_SOCKET=/run/chairlift/admin.sock", dockerfile)
    assert 'CMD ["python", "/opt/health.py"]' in dockerfile
    command = [sys.executable, str(ROOT / "docker/health.py")]
    path = tmp_path / "admin.sock"
    environment = os.environ | {"CHAIRLIFT_ADMIN_SOCKET": str(path)}
    assert "no answer" in subprocess.run(command, env=environment, capture_output=True, text=True).stderr
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        check = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        client, _ = listener.accept()
        with client:
            assert client.recv(1000).startswith(b"GET /health HTTP/1.1")
            client.sendall(b"HTTP/1.1 %d X\r\nContent-Length: 5\r\n\r\nstuck" % status)
        said = check.communicate()[1]
    assert (check.returncode == 0, "stuck" in said) == (status == 200, status == 503)


def test_the_examples_of_a_deployment_have_flags_and_probes_that_exist(monkeypatch):
    for name in [name for name in os.environ if name.startswith("CHAIRLIFT_")]:
        monkeypatch.delenv(name)
    known = build_parser("serve")
    unit = (ROOT / "deploy/chairlift.service").read_text()
    [started] = re.findall(r"^ExecStart=/opt/chairlift/bin/chairlift (.*)$", unit, re.MULTILINE)
    assert known.parse_args(started.split()).config == "/etc/chairlift/config.yaml"
    arguments = vars(known.parse_args(["serve", "--config", str(ROOT / "deploy/config.yaml")]))
    assert read_config(arguments)["uds"] == "/run/chairlift/http.sock"
    assert (ROOT / "deploy/config.yaml").read_text().partition("\n")[2].strip() == "\n".join(
        line.partition("#")[0].rstrip() for line in re.findall(r"```yaml\n(.*?)\n```", page("production"), re.DOTALL)[0].splitlines()
    )
    assert f"server unix:{read_config(arguments)['uds']};" in (ROOT / "deploy/nginx.conf").read_text()
    manifests = list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()))
    [deployment] = [one for one in manifests if one["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert known.parse_args(container["args"]).max_num_queued_reqs == 256
    probes = [container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {route.path for route in routes()}.issuperset(probes)
    assert pod["terminationGracePeriodSeconds"] > ServerConfig().shutdown_timeout + 5
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    [service] = [one for one in manifests if one["kind"] == "Service"]
    assert service["metadata"]["name"] != "chairlift", "Kubernetes would set CHAIRLIFT_PORT"


def page(name):
    return (ROOT / f"docs/{name}.md").read_text()


def test_actions_are_pinned_by_their_commit():
    uses = [line for file in (ROOT / ".github/workflows").glob("*.yml") for line in file.read_text().splitlines() if " uses: " in line]
    assert len(uses) > 10
    for line in uses:
        assert re.search(r" uses: [\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


@pytest.mark.slow
def test_the_source_distribution_holds_the_kernels_and_every_crate(tmp_path):
    subprocess.run([sys.executable, "-m", "maturin", "sdist", "--out", str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"Cargo.lock", "LICENSE", "README.md", "pyproject.toml", "python/chairlift/kernels/rms_norm.py"} <= names
    assert {f"rust/{crate.name}/Cargo.toml" for crate in (ROOT / "rust").iterdir() if crate.is_dir()} <= names
    assert not [name for name in names if name.startswith("tests/") or name.endswith(".so")]


@pytest.fixture
def published(tmp_path):
    """The two files after the URL was set."""
    spec = importlib.util.spec_from_file_location("set_repository_url", ROOT / ".ci/set_repository_url.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    script.main(URL, tmp_path)
    return tmp_path


def test_the_url_of_the_repository_is_set_where_it_is_published(published):
    project = tomllib.loads((published / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == URL
    assert project["scripts"]["chairlift"]
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", (published / "README.md").read_text())
    assert links
    for image, target in links:
        assert target.startswith(f"{URL}/{'raw' if image else 'blob'}/main/"), target
        assert (ROOT / target.split("/main/", 1)[1].split("#")[0]).exists(), target


def test_a_tag_publishes_without_stored_keys_after_all_was_tried():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    tagged = {name: job for name, job in jobs.items() if "refs/tags/v" in job.get("if", "")}
    assert set(tagged) == {"release", "pypi", "image", "site"}
    assert all({"sdist", "try"} <= set(job["needs"]) and job["permissions"]["id-token"] == "write" for job in tagged.values())
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()
    claimed = {line.rpartition(" ")[2] for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]}
    assert set(jobs["try"]["strategy"]["matrix"]["python"]) == {name for name in claimed if name.startswith("3.")}


def test_the_workflows_use_targets_and_scripts_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (ROOT / ".github/workflows").iterdir():
        jobs = yaml.safe_load(path.read_text())["jobs"]
        for job in jobs.values():
            assert job["timeout-minutes"]
            for need in [job.get("needs", [])] if isinstance(job.get("needs"), str) else job.get("needs", []):
                assert need in jobs
            for command in (step.get("run", "") for step in job["steps"]):
                assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= targets
                assert all((ROOT / script).exists() for script in re.findall(r"\.ci/\w+(?:\.py)?", command))
