"""A headless Chromium, driven over its DevTools pipe: no driver and no network."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
# bash, because its redirections know descriptors of two digits
START = 'r=$1 w=$2; shift 2; exec "$@" 3<&$r 4>&$w'
KEYS = {"Tab": 9, "Enter": 13}


def find_chromium():
    return next((path for path in map(shutil.which, NAMES) if path), None)


def _high_pipe():
    """A pipe whose ends are not 3 and 4, where Chromium expects its own."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high


class Browser:
    """One page, what it logged and what it asked for."""

    def __init__(self, folder):
        down, self._to = _high_pipe()
        self._from, up = _high_pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options += ["--hide-scrollbars"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", START, "bash", str(down), str(up), find_chromium(), *options],
            pass_fds=(down, up), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(down)
        os.close(up)
        self._rest, self._number, self._session = b"", 0, None
        self.events = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(60)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def open(self, path, *, width=1200, height=900, dark=False):
        """Show a page of a given size and theme, from the beginning."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + 60
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive(end - time.monotonic()))

    def value(self, expression):
        """What an expression is in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key):
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def screenshot(self, path):
        """The whole page as a PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    @property
    def requests(self):
        found = [e["params"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in found]

    @property
    def problems(self):
        """Errors and warnings of the console, and exceptions."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event["method"] in kinds]

    def close(self):
        try:
            self.call("Browser.close")
        finally:
            os.close(self._to)
            os.close(self._from)
            self._process.wait(30)

    def _receive(self, seconds):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0, seconds))
            assert ready, "Chromium does not answer"
            read = os.read(self._from, 1 << 20)
            assert read, "Chromium has gone"
            self._rest += read
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)
