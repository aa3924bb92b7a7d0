import shutil
import subprocess

import pytest


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The files of a certificate for 127.0.0.1, and of its key."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return str(folder / "cert.pem"), str(folder / "key.pem")
