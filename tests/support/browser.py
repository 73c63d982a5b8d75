"""A real browser without a window, by its own debugging protocol: what it needs is a Chromium on the PATH."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.waiting import wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0")
MAX_MESSAGE = 64 << 20


def chromium() -> str | None:
    """Its path, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.complaints: list[str] = []
        """What the page's console and its security policy had to say."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        wanted = next(self._ids)
        await self._socket.send_json({"id": wanted, "method": method, "params": parameters})
        async with asyncio.timeout(60):
            while True:
                message = await self._socket.receive_json()
                if message.get("method") == "Runtime.exceptionThrown":
                    self.complaints.append(str(message["params"]["exceptionDetails"]))
                elif message.get("method") == "Log.entryAdded":
                    self.complaints.append(str(message["params"]["entry"]))
                if message.get("id") == wanted:
                    assert "error" not in message, f"{method}: {message['error']}"
                    return message["result"]

    async def go(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    async def wait(self, script: str, timeout: float = 60.0) -> Any:  # noqa: ASYNC109 - fails with the script
        async def look() -> Any:
            return await self.run(script)

        return await wait_until(look, timeout, what=script, every=0.1)

    async def press(self, key: str, text: str = "", code: int = 0) -> None:
        """A key goes down and up, as a person's would."""
        named = {"key": key, "windowsVirtualKeyCode": code or ord(key[0].upper())}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **named)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    async def picture(self, path: Path, width: int = 1280, height: int = 1400) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        found = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(found["data"]))

    async def dark(self, *, on: bool) -> None:
        """What the person has set for all pages."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """An empty tab of a browser with a profile of its own."""
    found = chromium()
    assert found is not None, "no Chromium on the PATH"
    line = [found, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        told = folder / "DevToolsActivePort"
        await wait_until(
            lambda: told.exists() and len(told.read_text().splitlines()) == 2, 60, what="the browser's port"
        )
        port = int(told.read_text().splitlines()[0])
        async with aiohttp.ClientSession() as http:

            async def first_tab() -> str | None:
                async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = [each for each in await answer.json() if each["type"] == "page"]
                return tabs[0]["webSocketDebuggerUrl"] if tabs else None

            address = await wait_until(first_tab, 30, what="a tab")
            async with http.ws_connect(address, max_msg_size=MAX_MESSAGE) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 20)
