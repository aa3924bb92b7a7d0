"""Takes docs/dashboard.png: the dashboard under the load of three tenants.

`python docs/generators/dashboard_picture.py` needs `pip install playwright` and Debian's `chromium`. Nothing else should run.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError

from playwright.sync_api import sync_playwright
from running_server import Server

PICTURE = Path(__file__).parent.parent / "dashboard.png"
WORDS = ["alpha", "beta", "gamma", "delta", "kappa", "sigma", "river", "bridge", "mountain", "city"]
FLAGS = ("--scheduling-policy", "fair", "--max-num-seqs", "16", "--num-kv-blocks", "200", "--max-model-len", "1024")
SECONDS = 60
"""How long the load runs before the picture."""


def use(server: Server, tenant: str, seed: int, until: float) -> None:
    """Sends one request after another."""
    chosen = random.Random(seed)
    with contextlib.suppress(URLError):  # the server has ended
        while time.monotonic() < until:
            prompt = " ".join(["You are a helpful assistant.", *(chosen.choice(WORDS) for _ in range(chosen.randint(60, 150)))])
            for _ in server.stream({"x-tenant-id": tenant}, prompt=prompt, max_tokens=chosen.randint(20, 150), ignore_eos=True):
                pass


def main() -> None:
    """Takes the picture."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Server(folder, *FLAGS)) as server,
        ThreadPoolExecutor(26) as pool,
        sync_playwright() as playwright,
    ):
        server.wait()
        until = time.monotonic() + SECONDS
        for user in range(26):
            pool.submit(use, server, ("alice", "bob", "carol", "carol", "carol")[user % 5], user, until)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1240, "height": 1500}, color_scheme="dark")
        page.goto(f"{server.url}/dashboard")
        page.wait_for_timeout(SECONDS * 1000)
        page.screenshot(path=str(PICTURE), full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
