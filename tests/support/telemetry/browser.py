"""A headless Chromium that a test drives by its debugging protocol (CDP), and what went wrong on the page."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.support.repository.needs import need

STARTS_S, ANSWERS_S = 60.0, 60.0
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str:
    """The program; skips the test with a reason if there is none, and fails if MEGARL_NEEDS_CHROMIUM is set."""
    for name in PROGRAMS:
        if (path := shutil.which(name)) is not None:
            return path
    need("MEGARL_NEEDS_CHROMIUM", "there is no Chromium: run tools/browser_tools.sh as root")
    raise AssertionError("need ends the test")


class Page:
    """One page; `errors`: exceptions, console errors, and refused or failed loads, as text."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._number = connection, 0
        self._loaded = False
        self.errors: list[str] = []
        self.requests: list[str] = []  # addresses that the page has asked for
        for domain in ("Runtime", "Log", "Page", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        """Load a file, and wait until its scripts have run."""
        self._loaded = False
        self._call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + ANSWERS_S
        while not self._loaded:
            self._note(self._receive(until))
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression on the page, as JSON; an exception fails the test."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        """Give the window another size."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.evaluate("new Promise(done => setTimeout(() => requestAnimationFrame(() => done(1)), 300))")

    def prefer(self, scheme: str) -> None:
        """Let the system be `light` or `dark`."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        until = time.monotonic() + ANSWERS_S
        while True:
            message = self._receive(until)
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def _receive(self, until: float) -> dict[str, Any]:
        return json.loads(self._connection.recv(timeout=max(0.0, until - time.monotonic())))

    def _note(self, message: dict[str, Any]) -> None:
        method, content = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(content["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(content["args"]))
        elif method == "Log.entryAdded" and content["entry"]["level"] in ("error", "warning"):
            self.errors.append(content["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(content["request"]["url"])


@contextmanager
def browser(scratch: Path) -> Iterator[Page]:
    """A page of a new Chromium, which ends with the block. `scratch`: an empty directory for its profile."""
    # Without a sandbox of its own: tests run as root, and the page is ours.
    command = [
        find_chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--remote-debugging-port=0", f"--user-data-dir={scratch}", "--window-size=1400,1000", "about:blank",
    ]  # fmt: skip
    with (scratch.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"HOME": str(scratch)})
    try:
        with connect(_page_address(scratch, process), max_size=1 << 26, open_timeout=STARTS_S) as connection:
            yield Page(connection)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def _page_address(scratch: Path, process: subprocess.Popen[bytes]) -> str:
    """The address of the first page, once Chromium has written where it listens."""
    from urllib.request import urlopen

    port_file, until = scratch / "DevToolsActivePort", time.monotonic() + STARTS_S
    while not (port_file.exists() and port_file.read_text().strip()):
        assert process.poll() is None, f"Chromium ended with {process.returncode}: see chromium.log"
        assert time.monotonic() < until, f"the test waited {STARTS_S:.0f} s for Chromium to listen"
        time.sleep(0.05)
    port = port_file.read_text().split()[0]
    while time.monotonic() < until:
        with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=STARTS_S) as answer:
            pages = [each for each in json.load(answer) if each["type"] == "page"]
        if pages:
            return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError(f"the test waited {STARTS_S:.0f} s for a page of Chromium")
