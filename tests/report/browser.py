"""Opens a page in headless Chromium by its debugging pipe and records requests, console entries and a screenshot."""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-extensions", "--no-first-run", "--hide-scrollbars")

#: The browser reads commands from file descriptor 3 and answers on 4. Both may already be in use here.
_HAND_OVER = """import os, sys
pair = [os.dup(int(number)) for number in sys.argv[1:3]]
while min(pair) < 5:
    pair = [os.dup(number) for number in pair]
os.dup2(pair[0], 3)
os.dup2(pair[1], 4)
os.execv(sys.argv[3], sys.argv[3:])"""


@dataclass
class Visit:
    """Result of a page load: requested URLs, console entries, page size in CSS pixels and a screenshot."""

    requests: list = field(default_factory=list)
    complaints: list = field(default_factory=list)
    answers: list = field(default_factory=list)
    png: bytes = b""


def visit(path, width, questions=(), picture=False):
    """Open a file at a width in CSS pixels and evaluate each question, a JavaScript expression, in the page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        to_browser, ours = os.pipe()
        theirs, from_browser = os.pipe()
        command = [sys.executable, "-c", _HAND_OVER, str(to_browser), str(from_browser), CHROMIUM, *_FLAGS]
        command += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        process = subprocess.Popen(
            command,
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            return _Session(ours, theirs).visit(path, width, questions, picture)
        finally:
            os.close(ours)
            os.close(theirs)
            os.killpg(process.pid, signal.SIGKILL)  # includes child processes
            process.wait(30)


class _Session:
    def __init__(self, ours, theirs):
        self._ours, self._theirs = ours, theirs
        self._buffer = b""
        self._number = 0
        self._seen = Visit()
        self._loaded = False

    def visit(self, path, width, questions, picture):
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._ask(f"{domain}.enable", session)
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            session,
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self._loaded = False
        self._ask("Page.navigate", session, url=path.resolve().as_uri())
        while not self._loaded:
            self._take(self._next())
        for question in questions:
            answer = self._ask("Runtime.evaluate", session, expression=question, returnByValue=True)
            self._seen.answers.append(answer["result"].get("value"))
        if picture:
            shot = self._ask("Page.captureScreenshot", session, captureBeyondViewport=True)
            self._seen.png = base64.b64decode(shot["data"])
        return self._seen

    def _ask(self, method, session=None, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._ours, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._take(answer)

    def _next(self):
        while b"\0" not in self._buffer:
            piece = os.read(self._theirs, 1 << 16)
            assert piece, "the browser has gone"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _take(self, event):
        match event.get("method"):
            case "Network.requestWillBeSent":
                self._seen.requests.append(event["params"]["request"]["url"])
            case "Log.entryAdded":
                self._seen.complaints.append(event["params"]["entry"]["text"])
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown":
                self._seen.complaints.append(str(event["params"]))
            case "Page.loadEventFired":
                self._loaded = True
