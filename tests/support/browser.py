"""A real browser without a window, steered by its own protocol over two pipes: Chromium, if there is one.

Must not know: what the pages say.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
DEADLINE_S = 300.0
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    *("--remote-debugging-pipe", "--window-size=1200,900", "--force-prefers-reduced-motion"),
)


def found() -> str | None:
    """The path of a browser on this machine; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A page in a browser, as long as the block lasts.

    Args:
        path: of the browser; see `found`.

    Attributes:
        requested: addresses of all that the page has asked for.
        failed: what its scripts have thrown.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._number = 0
        self._session: str | None = None
        self._left = b""
        self._loaded = False
        self.requested: list[str] = []
        self.failed: list[str] = []

    def __enter__(self) -> Browser:
        self._folder = tempfile.TemporaryDirectory(prefix="ecemb-browser-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def its_pipes() -> None:  # the browser reads from 3 and writes to 4
            kept_in, kept_out = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(kept_in, 3)
            os.dup2(kept_out, 4)

        self._process = subprocess.Popen(
            [self._path, *_OPTIONS, f"--user-data-dir={self._folder.name}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=its_pipes,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(self._in, False)
        self._deadline = time.monotonic() + DEADLINE_S
        try:
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Network"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # with all that it has started
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def open(self, path: Path) -> None:
        """Opens a file, and waits until it is loaded."""
        self._loaded = False
        self._call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._next()

    def resize(self, width: int, height: int) -> None:
        """Gives the page's window another size, in pixels of CSS."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def value(self, script: str) -> Any:
        """What an expression in the page gives, as JSON has it.

        Raises:
            RuntimeError: It throws.
        """
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def click(self, element: str) -> None:
        """Clicks on the middle of an element, named by an expression in the page."""
        x, y = self.value(
            f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'center', inline: 'center'}}); "
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Types where the last click was."""
        self._call("Input.insertText", text=text)

    def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something holds of the page.

        Raises:
            TimeoutError: It doesn't within minutes.
        """
        while not holds():
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"the page was not ready within {DEADLINE_S} s")

    def _call(self, method: str, **parameters: object) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        """What the browser says next; of events, what this object shows is noted."""
        answer = self._read()
        kind = answer.get("method")
        if kind == "Page.loadEventFired":
            self._loaded = True
        elif kind == "Network.requestWillBeSent":
            self.requested.append(answer["params"]["request"]["url"])
        elif kind == "Runtime.exceptionThrown":
            self.failed.append(json.dumps(answer["params"]["exceptionDetails"]))
        return answer

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            wait_s = self._deadline - time.monotonic()
            if not select.select([self._in], [], [], max(0.0, wait_s))[0]:
                raise TimeoutError(f"{self._path} has not answered within {DEADLINE_S} s")
            read = os.read(self._in, 1 << 20)
            if not read:
                raise RuntimeError(f"{self._path} has ended with {self._process.wait()}")
            self._left += read
        first, _, self._left = self._left.partition(b"\0")
        return json.loads(first)
