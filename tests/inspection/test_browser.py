"""Pictures of plans in a browser: read with the mouse, with keys, and in a cell of a notebook.

All tests share one headless Chromium: that of the system, which `make unit` installs if it may.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

import kvplan
from kvplan import CacheDesc, DataType, Plan, Rows, Shard, Transfer
from tests.support.browser import chromium, resize
from tests.support.plans import joined

DEADLINE_S = 60
FP16 = DataType.DT_FLOAT16
NHD = CacheDesc(4, (16, 16, 8, 128), FP16, kv_tensor_format="NHD")
SMALL = kvplan.plan(Transfer(Rows(NHD, [4, 5, 9]), Rows(NHD, [7, 8, 2])), local="dst")
SWAPPED = kvplan.plan(Transfer(Rows(NHD, [5, 4, 9]), Rows(NHD, [7, 8, 2])), local="dst")
EVIL = "</script><img src=x onerror=document.title='evil'>"


def unlike() -> Plan:
    src = CacheDesc(4, (64, 16, 2, 128), FP16, kv_tensor_format="NHD",
                    shard=Shard(heads=range(2, 4), num_heads=8))  # fmt: skip
    dst = CacheDesc(4, (32, 4, 32, 128), FP16, kv_tensor_format="HND",
                    shard=Shard(heads=range(4), num_heads=8))  # fmt: skip
    return kvplan.plan(
        Transfer(Rows(src, [5, 9, 6]), Rows(dst, [3, 1]), num_tokens=40), local="dst"
    )


def large() -> Plan:
    rng = np.random.default_rng(1)
    desc = CacheDesc(122, (8192, 16, 8, 128), FP16, kv_tensor_format="NHD")
    src, dst = (rng.permutation(8192)[:4096] for _ in range(2))
    return kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst)), local="dst")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


class Page:
    """An open page, and the actions of a person on it."""

    def __init__(self, driver: webdriver.Chrome, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def open(self, plan: Plan, *, diff: Any = None, width: int = 1280) -> None:
        self.show(plan.to_html(diff=diff), width)

    def show(self, document: str, width: int = 1280) -> None:
        path = self.folder / "page.html"
        path.write_text(document, encoding="utf-8")
        self.size(width)
        self.driver.get(path.as_uri())

    def size(self, width: int) -> None:
        resize(self.driver, width)

    def scheme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def press(self, *keys: str) -> None:
        ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    def point_at(self, web_element: WebElement) -> None:
        ActionChains(self.driver, duration=0).move_to_element(web_element).perform()

    def labels(self) -> list[str]:
        """Return the descriptions of the bands for a screen reader."""
        found: list[str] = self.driver.execute_script(
            "return [...document.querySelectorAll('.band')]"
            ".map((it) => it.getAttribute('aria-label'))"
        )
        return found

    def detail(self) -> str:
        return self.one(".detail").text

    def until(self, holds: Callable[[], object]) -> None:
        WebDriverWait(self.driver, DEADLINE_S, 0.02).until(lambda _: holds())

    def focused(self) -> str:
        return self.driver.switch_to.active_element.get_attribute("aria-label") or ""


@pytest.fixture
def page(driver: webdriver.Chrome, tmp_path: Path) -> Page:
    return Page(driver, tmp_path)


def label(page: Page, text: str) -> WebElement:
    """Return the number in a box of a band, which lets the pointer through."""
    return next(element for element in page.all("text.end") if element.text == text)


def test_pointing_at_a_band_shows_its_rows_and_tokens(page: Page) -> None:
    page.open(SMALL)
    assert page.one("svg text.head").text == (
        "Pulls 3 blocks of a peer into 3 blocks, in 2 layers: 384 KiB in 8 descriptors."
    )
    page.point_at(label(page, "2"))
    page.until(lambda: "block 9" in page.detail())
    assert page.detail().splitlines() == [
        "block 9 → block 2",
        "layer 0 → 0: tensors 0 → 0 K, 1 → 1 V · heads 0..7 · tokens 32..47 · entry 2 of 3 in the "
        "block table · 32 KiB in 1 descriptor, in each of 4 tensors: 128 KiB in all",
    ]
    assert "block 9 → block 2; heads 0..7; tokens 32..47; entry 2 of 3" in page.labels()[1]
    page.point_at(page.one("output"))
    page.until(lambda: page.detail().startswith("Point at a band"))


def test_the_slider_goes_through_the_layers(page: Page) -> None:
    page.open(SMALL)
    assert page.one("output").text == "layer 0 → 0: tensors 0 → 0 K, 1 → 1 V"
    page.one("input").send_keys(Keys.ARROW_RIGHT)
    page.until(lambda: page.one("output").text == "layer 1 → 1: tensors 2 → 2 K, 3 → 3 V")
    page.point_at(label(page, "0–1"))
    page.until(lambda: "layer 1 → 1: tensors 2 → 2 K, 3 → 3 V" in page.detail())
    assert page.detail().startswith("blocks 4–5 → blocks 7–8")


def test_keys_reach_everything(page: Page) -> None:
    page.open(large())
    page.press(Keys.TAB, Keys.TAB)
    page.until(lambda: "26 runs" in page.focused())
    assert "entries 0..25 of 4,096" in page.focused()
    assert page.detail().startswith("26 runs")
    page.press(Keys.ARROW_RIGHT)
    page.until(lambda: "entries 26..51" in page.focused())
    page.press(Keys.END)
    page.until(lambda: "..4095 of 4,096" in page.focused())
    page.press(Keys.ARROW_RIGHT)  # there is not a next band
    page.press(Keys.ARROW_LEFT, Keys.HOME)
    page.until(lambda: "entries 0..25" in page.focused())


def test_groups_are_stacked_and_their_names_are_only_text(page: Page) -> None:
    page.open(joined({EVIL: SMALL, "indexer": unlike()}))
    heads = page.all("svg > text.soft:first-of-type")
    assert [head.text.partition(" · part ")[2] for head in heads] == [EVIL, "indexer"]
    assert page.all("img") == []
    assert page.driver.title.startswith("<Plan pull_groups")
    assert [element.text for element in page.all("tspan.odd")] == [
        "≠ token 16", "≠ head 2", "≠ head 4", "≠ token 32"
    ]  # fmt: skip
    page.point_at(label(page, "16–31"))
    page.until(lambda: "block 9 → block 3" in page.all(".detail")[1].text)
    assert page.all(".detail")[0].text.startswith("Point at")


def test_a_difference_shows_both_plans(page: Page) -> None:
    page.open(SMALL, diff=SWAPPED)
    assert page.one("h1").text.startswith("verdict: different bytes - 262,144 destination bytes")
    assert "src_blocks[0] and src_blocks[1] are swapped (4 and 5)" in page.one("pre").text
    assert [element.text for element in page.all("h2")] == ["Old plan", "New plan"]
    assert [label.partition(";")[0] for label in page.labels()] == [
        "blocks 4–5 → blocks 7–8", "block 9 → block 2",
        "block 5 → block 7", "block 4 → block 8", "block 9 → block 2",
    ]  # fmt: skip


def test_the_page_works_in_a_notebook(page: Page) -> None:
    page.show(f"<!doctype html><style>main, svg {{ display: none }}</style>{SMALL._repr_html_()}")
    page.driver.switch_to.frame(page.one("iframe"))
    assert page.one("svg").is_displayed()
    page.point_at(label(page, "2"))
    page.until(lambda: "block 9 → block 2" in page.detail())
    page.driver.switch_to.default_content()


OVERLAPS = """
const found = [], texts = [...document.querySelectorAll("svg text")];
const boxes = texts.map((it) => [it.textContent, it.getBoundingClientRect()]);
const meet = (p, q) => p.left + 1 < q.right && q.left + 1 < p.right
  && p.top + 2 < q.bottom && q.top + 2 < p.bottom;
for (const [a, p] of boxes) {
  for (const [b, q] of boxes) if (p !== q && meet(p, q)) found.push(`${a} and ${b}`);
  if (p.left < -1 || p.right > Math.max(innerWidth, 738)) found.push(`${a} is cut`);
}
if (document.documentElement.scrollWidth > innerWidth) found.push("the page is too wide");
return found;
"""


@pytest.mark.parametrize("width", [1280, 700, 380])
def test_boxes_do_not_overlap_and_are_not_cut(page: Page, width: int) -> None:
    desc = CacheDesc(64, (100_000, 16, 8, 128), FP16, kv_tensor_format="NHD")
    rng = np.random.default_rng(3)
    runs = [np.arange(5000 * number, 5000 * number + 30) for number in (1, 2)]
    src, dst = (np.concatenate([rng.permutation(5000)[:70], run]) for run in runs)
    for plan in (
        SMALL,
        unlike(),
        kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst)), local="dst"),
    ):
        page.open(plan, width=width)
        assert page.driver.execute_script(OVERLAPS) == []
    page.open(SMALL, diff=SWAPPED, width=width)
    assert page.driver.execute_script(OVERLAPS) == []


CONTRASTS = """
const parts = (text) => text.match(/[\\d.]+/g).map(Number);
const linear = (it) => (it /= 255) <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4;
const light = (rgb) => 0.2126 * linear(rgb[0]) + 0.7152 * linear(rgb[1]) + 0.0722 * linear(rgb[2]);
const ground = (it) => {
  for (; it; it = it.parentElement) {
    const colour = parts(getComputedStyle(it).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
};
const words = "h1, h2, p, pre, output";
return [...document.querySelectorAll(words)].filter((it) => it.textContent.trim()).map((it) => {
  const style = getComputedStyle(it), own = it instanceof SVGElement ? style.fill : style.color;
  const a = light(parts(own)), b = light(ground(it));
  return [it.textContent, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
}).filter(([, ratio]) => ratio < 4.5);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_schemes(page: Page, scheme: str) -> None:
    page.scheme(scheme)
    page.open(unlike(), diff=SMALL)
    assert page.driver.execute_script(CONTRASTS) == []


def test_no_page_sent_a_request_or_logged_an_error(page: Page) -> None:
    """The check covers every page that earlier tests have opened, and another one."""
    page.open(large(), diff=unlike())
    page.until(lambda: page.all(".band"))
    assert page.driver.get_log("browser") == []
    assert {request.partition(":")[0] for request in requests(page)} <= {"file", "data"}
    page.show('<!doctype html><img src="http://127.0.0.1:9/picture.png">')  # must be found
    page.until(lambda: "http://127.0.0.1:9/picture.png" in requests(page))


def requests(page: Page) -> list[str]:
    """Return the requests of our documents since the last call; the first tab is the browser's."""
    events = [json.loads(item["message"])["message"] for item in page.driver.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [
        event["request"]["url"] for event in sent if not event["documentURL"].startswith("chrome")
    ]
