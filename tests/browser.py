"""A headless Chromium for tests of pages, driven over a pipe; it needs nothing but the browser."""

import base64
import fcntl
import itertools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    # Spheres are drawn with WebGL, which without a graphics card is computed.
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--remote-debugging-pipe",
)


def find():
    """Path of a browser, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One browser process; a context manager."""

    def __init__(self, path, deadline=60.0):
        self.deadline = deadline
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # The browser reads commands from 3 and answers on 4; moved high, the two cannot collide.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (commands, answers)]
        os.close(commands), os.close(answers)
        start = f"import os, sys; os.dup2({high[0]}, 3); os.dup2({high[1]}, 4); "
        start += "os.execv(sys.argv[1], sys.argv[1:])"
        arguments = [*FLAGS, f"--user-data-dir={self._home.name}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", start, path, *arguments],
            pass_fds=high,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in high:
            os.close(end)
        self._numbers, self._buffer, self._events = itertools.count(1), b"", []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Its own session holds the browser and its children, and nothing else.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._commands), os.close(self._answers)
        self._home.cleanup()

    def call(self, method, session=None, **parameters):
        """Send a command and wait for its answer; events on the way are kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + self.deadline
        while True:
            answer = self._read(until)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._events.append(answer)

    def events(self, session, method):
        """Parameters of all events of a kind that a page has sent so far."""
        return [
            event["params"]
            for event in self._events
            if event.get("sessionId") == session and event.get("method") == method
        ]

    def _read(self, until):
        while b"\0" not in self._buffer:
            # Not select(), which takes no file beyond the thousandth that is open.
            with selectors.DefaultSelector() as selector:
                selector.register(self._answers, selectors.EVENT_READ)
                ready = selector.select(max(0.0, until - time.monotonic()))
            block = os.read(self._answers, 1 << 16) if ready else b""
            if not block:
                raise TimeoutError("the browser did not answer")
            self._buffer += block
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, path, *, width=1280, height=900, dark=False, media=""):
        """Open a file from disk without a network, and wait until its plots are drawn."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        page.call("Page.navigate", url=Path(path).resolve().as_uri())
        page.wait_for("document.readyState === 'complete'")
        return page


class Page:
    """One open page."""

    def __init__(self, browser, session, target):
        self._browser, self._session, self._target = browser, session, target

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._browser.call("Target.closeTarget", targetId=self._target)

    def call(self, method, **parameters):
        """A command to this page."""
        return self._browser.call(method, self._session, **parameters)

    def run(self, script):
        """Value of a JavaScript expression; promises are waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description"))
        return answer["result"].get("value")

    def wait_for(self, condition, seconds=60.0):
        """Wait until a JavaScript expression is true."""
        until = time.monotonic() + seconds
        while not self.run(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"the page did not come to {condition}")
            time.sleep(0.05)

    def errors(self):
        """Everything that a user would see in red in the console."""
        events = self._browser.events
        said = [
            " ".join(str(part.get("value", part.get("description"))) for part in event["args"])
            for event in events(self._session, "Runtime.consoleAPICalled")
            if event["type"] in ("error", "assert")
        ]
        thrown = [
            event["exceptionDetails"]["exception"].get("description", "exception")
            for event in events(self._session, "Runtime.exceptionThrown")
        ]
        logged = [
            event["entry"]["text"]
            for event in events(self._session, "Log.entryAdded")
            if event["entry"]["level"] == "error"
        ]
        return said + thrown + logged

    def requests(self):
        """Addresses that the page asked for, itself and what it carries inside left out."""
        return [
            event["request"]["url"]
            for event in self._browser.events(self._session, "Network.requestWillBeSent")
            if not event["request"]["url"].startswith(("file:", "data:", "blob:", "about:"))
        ]

    def screenshot(self, path):
        """Save the whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        image = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )
        Path(path).write_bytes(base64.b64decode(image["data"]))
