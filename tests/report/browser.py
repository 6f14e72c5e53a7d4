"""Opens a page in headless Chromium by its debugging pipe, acts on it, and records requests and console entries."""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager

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


@contextmanager
def opened(path, width, *, scripts=True, dark=False, downloads=None):
    """Open a file at a width in CSS pixels and yield the page; ``downloads`` is the folder for files that it saves."""
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
            page = OpenedPage(ours, theirs, width, dark=dark, scripts=scripts, downloads=downloads)
            page.go(path)
            yield page
        finally:
            os.close(ours)
            os.close(theirs)
            os.killpg(process.pid, signal.SIGKILL)  # includes child processes
            process.wait(30)


class OpenedPage:
    """A page in the browser; ``requests`` are the requested URLs, and ``complaints`` the console entries."""

    def __init__(self, ours, theirs, width, *, dark, scripts, downloads):
        self.requests, self.complaints = [], []
        self._ours, self._theirs = ours, theirs
        self._buffer = b""
        self._number = 0
        self._loaded = False
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self.media(dark=dark)
        if not scripts:
            self._call("Emulation.setScriptExecutionDisabled", value=True)
        if downloads:
            self._ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))

    def go(self, path):
        """Load a file, or the page that reloads itself, and wait until it has loaded."""
        self._loaded = False
        self._call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for_load()

    def wait_for_load(self):
        """Wait until the page has loaded since the last wait."""
        while not self._loaded:
            self._take(self._next())
        self._loaded = False

    def evaluate(self, expression):
        """Return the value of a JavaScript expression in the page, awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def mouse(self, *points, clicks=0, drag=False):
        """Move the mouse over points (x, y) in CSS pixels of the window, and click at the last or drag to it."""
        (x, y), pressed = points[0], {"button": "left", "clickCount": 1}
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if drag:
            self._call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, **pressed)
        for x, y in points[1:]:
            self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, **(pressed if drag else {}))
        if drag:
            self._call("Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, **pressed)
        for count in range(1, clicks + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=count)

    def media(self, *, dark=False, printed=False):
        """Show the page as in a dark or light colour scheme, or as printed."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="print" if printed else "", features=[scheme])

    def screenshot(self):
        """Return a picture of the whole page as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def _call(self, method, **parameters):
        return self._ask(method, self._session, **parameters)

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
                self.requests.append(event["params"]["request"]["url"])
            case "Log.entryAdded":
                self.complaints.append(event["params"]["entry"]["text"])
            case "Runtime.consoleAPICalled":
                self.complaints.append(str(event["params"]["args"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(str(event["params"]["exceptionDetails"]["exception"].get("description")))
            case "Page.loadEventFired":
                self._loaded = True
