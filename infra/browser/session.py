"""A running browser, driven by Playwright."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from infra.browser.install import install, missing

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# a renderer on the processor: charts that ask for WebGL are drawn too
ARGUMENTS = ("--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader")


@contextmanager
def browser() -> "Iterator[Browser]":
    """A headless Chromium, closed at the end; installs it the first time.

    Its pages have no sandbox (a container's root has none to give), so show it only servers of your own.
    Raises as `install` does.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        raise missing("playwright") from None

    folder = install()
    with tempfile.TemporaryDirectory(prefix="sapo-browser-") as home, sync_playwright() as playwright:
        env = {
            **os.environ,
            "HOME": home,
            # of the C locale Chromium makes a language that pages cannot parse
            "LANG": "en_US.UTF-8",
            "LC_ALL": "en_US.UTF-8",
            "LANGUAGE": "en_US",
            "XDG_CACHE_HOME": home,
            "LD_LIBRARY_PATH": str(folder / "lib"),
            "FONTCONFIG_FILE": str(folder / "fonts.conf"),
        }
        started = playwright.chromium.launch(
            executable_path=folder / "chromium", env=dict(env), args=list(ARGUMENTS)
        )
        try:
            yield started
        finally:
            started.close()
