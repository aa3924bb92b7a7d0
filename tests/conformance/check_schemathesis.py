"""schemathesis: requests made from the OpenAPI document that the server publishes, and answers held against it."""

import os
import subprocess
import sys

import pytest

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance"),
    *("response_schema_conformance", "unsupported_method", "allow_header_conformance", "ignored_auth"),
)


@pytest.mark.parametrize("phase", ["examples,coverage", "fuzzing"])
def test_the_published_document(quick, key, phase, tmp_path):
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{quick}/openapi.json", "-H", f"Authorization: Bearer {key}"]
    command += ["--checks", ",".join(CHECKS), "--phases", phase, "--max-examples", "25", "--seed", "1", "--continue-on-failure"]
    command += ["--generation-database", "none", "--request-timeout", "60", "--suppress-health-check", "all", "--no-color"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
