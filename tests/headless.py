"""A headless Chromium on a pipe, for the few things that only a browser can tell: no driver program, no port, no package."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome-headless-shell", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1200,800", "--remote-debugging-pipe")


class Page:
    """One page, open while it is entered. Talks the DevTools protocol: JSON messages, each ended by a zero byte."""

    def __init__(self, file: Path, profile: Path, seconds: float = 30) -> None:
        assert BROWSER is not None
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        self._seconds, self._received, self._number, self._session = seconds, b"", 0, None
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'      # where the browser looks for the pipe
        self._browser = subprocess.Popen(["bash", "-c", shell, "-", BROWSER, *FLAGS, f"--user-data-dir={profile}"], pass_fds=(to_browser, from_browser),
                                         stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self._file = file

    def __enter__(self) -> Page:
        try:
            target = self.send("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            self.send("Page.navigate", url=self._file.as_uri())     # answered once the page has taken the blank one's place
            self.evaluate("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._browser.kill()
        self._browser.wait()
        os.close(self._commands)
        os.close(self._answers)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Press and release the mouse on an element, as a person would: through whatever lies above it."""
        box = self.evaluate(f"(() => {{ const box = document.querySelector({json.dumps(selector)}); box.scrollIntoView({{ block: 'center' }}); "
                            "const r = box.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer. Events that come in between are dropped."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            assert select.select([self._answers], [], [], self._seconds)[0], "the browser does not answer"
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser has gone"
            self._received += more
        first, _, self._received = self._received.partition(b"\0")
        return json.loads(first)
