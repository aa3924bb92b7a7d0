"""Takes docs/dashboard.png: the dashboard under the load of three tenants with tiers and sessions.

It needs `pip install playwright` and Debian's `chromium`; nothing else should run. With a folder as the argument it takes instead, for a
review, the dashboard in each of `SCENES`, at each of `WIDTHS`, light and dark, and writes what `chairlift top` prints.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError

from playwright.sync_api import Page, sync_playwright
from running_server import Server

from chairlift.checkpoint.cache import cache_dir, default_file

PICTURE = Path(__file__).parent.parent / "dashboard.png"
WORDS = ["alpha", "beta", "gamma", "delta", "kappa", "sigma", "river", "bridge", "mountain", "city"]
TENANTS, TIERS = ("alice", "bob", "carol", "carol", "carol"), ("priority", "default", "default", "flex")
TEAM = ("--scheduling-policy", "fair", "--max-num-seqs", "16", "--num-kv-blocks", "200", "--max-model-len", "1024")
MODELS = "[chat]\npath = {0}\npreload = true\n[small]\npath = {0}\nmax-model-len = 1024\n[unused]\npath = {0}\n"
SCENES = {
    "idle": (0, ()),
    "one": (1, ()),
    "team": (26, TEAM),
    "crowd": (500, ("--scheduling-policy", "fair", "--max-model-len", "1024", "--api-key", "alice=a,bob=b,carol=c", "--operator-key", "o")),
    "models": (12, ("--models", "models.toml", "--max-num-seqs", "8")),
    "engines": (26, (*TEAM, "--replicas", "2")),
}
"""How many requests are open at a time, and the flags of the server."""
WIDTHS, HEIGHT = (390, 820, 1440), 900
SECONDS = 60
"""How long the load runs before a picture."""


def use(server: Server, scene: str, user: int, until: float) -> None:
    """Sends one request after another, as the turns of a session."""
    chosen, text = random.Random(user), ""
    tenant = TENANTS[user % len(TENANTS)]
    headers = {"x-tenant-id": tenant, "x-session-id": f"{tenant}-{user}", "authorization": f"Bearer {tenant[0]}"}
    model = {"model": ("chat", "small")[user % 2]} if scene == "models" else {}
    with contextlib.suppress(URLError, ConnectionError):  # the server has ended
        while time.monotonic() < until:
            text = (text if len(text) < 2500 else "") + " ".join(chosen.choice(WORDS) for _ in range(chosen.randint(60, 150)))
            limits = {"max_tokens": chosen.randint(20, 150), "ignore_eos": True, "service_tier": TIERS[user % len(TIERS)]}
            text += "".join(server.stream(headers, prompt=text, **limits, **model))


@contextlib.contextmanager
def loaded(scene: str) -> Iterator[Server]:
    """Runs a server under a load, until the pictures are taken."""
    users, flags = SCENES[scene]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, users)) as pool:
        Path(folder, "models.toml").write_text(MODELS.format(repr(str(default_file(cache_dir())))))
        with contextlib.closing(Server(folder, *(flag.replace("models.toml", f"{folder}/models.toml") for flag in flags))) as server:
            server.wait()
            for user in range(users):
                pool.submit(use, server, scene, user, time.monotonic() + SECONDS + 30)
            yield server


def watch(page: Page, server: Server, seconds: float) -> None:
    """Opens the dashboard and lets it collect steps and samples."""
    page.goto(f"{server.url}/dashboard")
    page.wait_for_timeout(seconds * 1000)


def review(page: Page, folder: Path) -> None:
    """Takes the pictures of all scenes, and what `top` prints in terminals of three widths."""
    for scene in SCENES:
        with loaded(scene) as server:
            watch(page, server, SECONDS / 3)
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": HEIGHT})
                for scheme in ("light", "dark"):
                    page.emulate_media(color_scheme=scheme)
                    page.wait_for_timeout(1000)
                    page.screenshot(path=str(folder / f"{scene}-{width}-{scheme}.png"), full_page=True)
            for columns in (60, 100, 160):
                command = [sys.executable, "-m", "chairlift", "top", "--once", "--url", server.url, "--api-key", "o"]
                environment = os.environ | {"COLUMNS": str(columns), "LINES": "50", "FORCE_COLOR": "1"}
                printed = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
                (folder / f"{scene}-top-{columns}.ansi").write_bytes(printed)


def main() -> None:
    """Takes the picture of the page, or all pictures into the folder that is the argument."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        context = browser.new_context(http_credentials={"username": "operator", "password": "o"}, color_scheme="dark")
        page = context.new_page()
        page.set_viewport_size({"width": 1240, "height": 1500})
        if len(sys.argv) > 1:
            folder = Path(sys.argv[1])
            folder.mkdir(parents=True, exist_ok=True)
            review(page, folder)
        else:
            with loaded("team") as server:
                watch(page, server, SECONDS)
                page.screenshot(path=str(PICTURE), full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
