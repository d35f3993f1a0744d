"""A headless Chromium for tests that look at pages."""

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A `webdriver.Chrome`."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="no selenium: install the extra dpdask[test]"
    )
    chromium = (
        os.environ.get("DPDASK_TEST_CHROMIUM")
        or shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip(
            "no Chromium with its chromedriver: install them (apt-get install chromium chromium-driver), or name it in DPDASK_TEST_CHROMIUM"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=driver)
    )
    found.set_script_timeout(60)
    yield found
    found.quit()
