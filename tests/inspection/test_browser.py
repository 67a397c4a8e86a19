"""Pictures of plans in a browser: read by pointing, by keys alone, and in a notebook's cell.

One headless Chromium for all of them: the system's, which `make unit` installs where it may.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

import kvplan
from kvplan import CacheDesc, DataType, Plan, Rows, Shard, Transfer
from kvplan.inspection.contents import spans_text
from kvplan.inspection.units import span
from tests.support.plans import joined

DEADLINE_S = 60
FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
    "disable-background-networking", "disable-component-update", "disable-dev-shm-usage",
)  # fmt: skip

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
    binary, server = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or server is None:
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options, Service(server)) as driver:
        yield driver


class Page:
    """A page that is open, and what a person does with it."""

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
        metrics = {"width": width, "height": 1100, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def press(self, *keys: str) -> None:
        ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    def point_at(self, it: WebElement) -> None:
        ActionChains(self.driver, duration=0).move_to_element(it).perform()

    def labels(self) -> list[str]:
        """What a screen reader says of the bands."""
        found: list[str] = self.driver.execute_script(
            "return [...document.querySelectorAll('#picture .band')]"
            ".map((it) => it.getAttribute('aria-label'))"
        )
        return found

    def detail(self) -> str:
        return self.one("#detail").text

    def until(self, holds: Callable[[], object]) -> None:
        WebDriverWait(self.driver, DEADLINE_S, 0.02).until(lambda _: holds())

    def focused(self) -> str:
        return self.driver.switch_to.active_element.get_attribute("aria-label") or ""


@pytest.fixture
def page(driver: webdriver.Chrome, tmp_path: Path) -> Page:
    return Page(driver, tmp_path)


def label(page: Page, text: str) -> WebElement:
    """The number in a box of a band."""
    return next(it for it in page.all("text.end") if it.text == text)


def test_pointing_at_a_band_says_what_it_moves(page: Page) -> None:
    page.open(SMALL)
    assert page.one("h1").text == (
        "Pulls 3 blocks of a peer into 3 blocks, in 2 layers: 384 KiB in 8 descriptors."
    )
    page.point_at(label(page, "2"))
    page.until(lambda: "block 9" in page.detail())
    assert page.detail().splitlines() == [
        "block 9 → block 2",
        "Layer", "layer 0 → 0, tensors 0 → 0 K, 1 → 1 V",
        "Holds", "heads 0..7",
        "Request", "tokens 32..47",
        "Block table", "entry 2 of 3",
        "Bytes", "32 KiB in 1 descriptor, in each of 4 tensors: 128 KiB in all",
    ]  # fmt: skip
    assert page.one(".band.on").get_attribute("aria-label") == (
        "block 9 → block 2. layer 0 → 0, tensors 0 → 0 K, 1 → 1 V; heads 0..7; tokens 32..47; "
        "Block table: entry 2 of 3; 32 KiB in 1 descriptor, in each of 4 tensors: 128 KiB in all."
    )
    page.point_at(page.one("h1"))
    page.until(lambda: page.detail().startswith("Point at a band"))


def test_the_slider_goes_through_the_layers(page: Page) -> None:
    page.open(SMALL)
    assert page.one("#layer-text").text == "layer 0 → 0"
    page.one("#layer").send_keys(Keys.ARROW_RIGHT)
    page.until(lambda: page.one("#layer-text").text == "layer 1 → 1")
    assert page.one("#tensors").text == "tensors 2 → 2 K, 3 → 3 V"
    page.point_at(label(page, "0–1"))
    page.until(lambda: "layer 1 → 1, tensors 2 → 2 K, 3 → 3 V" in page.detail())
    assert "blocks 4–5 → blocks 7–8" in page.detail()


def layers_of(plan: Plan) -> list[Plan]:
    return [
        plan.for_layers(plan.part.src_layers[it : it + 1])
        for it in range(len(plan.part.src_layers))
    ]


@pytest.mark.parametrize("name", ["runs", "stages", "kv inside", "slot", "push"])
def test_a_page_says_of_each_band_what_its_origins_say(page: Page, name: str) -> None:
    """In every layer: rows, heads, tokens, keys or values, and the layers' numbers."""
    stage = CacheDesc(4, (16, 16, 8, 128), FP16, kv_tensor_format="NHD",
                      shard=Shard(layers=range(2, 4), num_layers=4))  # fmt: skip
    whole = CacheDesc(8, (16, 16, 8, 128), FP16, kv_tensor_format="NHD",
                      shard=Shard(layers=range(4), num_layers=4))  # fmt: skip
    inside = CacheDesc(3, (16, 2, 16, 4, 64), FP16, kv_tensor_format="block kv token head dim")
    slots = CacheDesc(4, (4, 64, 8, 128), FP16, kv_tensor_format="slot token head dim")
    plan = {
        "runs": SMALL,
        "stages": kvplan.plan(Transfer(Rows(stage, [0, 5]), Rows(whole, [1, 3])), local="dst"),
        "kv inside": kvplan.plan(
            Transfer(Rows(inside, [1, 2, 9]), Rows(inside, [4, 5, 7])), local="dst"
        ),
        "slot": kvplan.plan(Transfer(Rows(slots, slot=1), Rows(NHD, [3, 4, 9])), local="dst"),
        "push": kvplan.plan(Transfer(Rows(NHD, [3, 1, 2]), Rows(NHD, [3, 4, 5])), local="src"),
    }[name]
    page.open(plan)
    for number, layer in enumerate(layers_of(plan)):
        if number:
            page.one("#layer").send_keys(Keys.ARROW_RIGHT)
        labels = page.labels()
        said = {it.partition(".")[0]: it for it in labels}
        assert len(said) == len(labels) == layer.part.segments.num_runs
        for run in range(layer.part.segments.num_runs):
            origin = layer.origin(run)
            ends = [
                f"{row}{'s' if rows[0] < rows[1] else ''} {span(rows).replace('-', '–')}"
                for row, rows in (
                    (origin.src_row, origin.src_rows),
                    (origin.dst_row, origin.dst_rows),
                )
            ]
            label = said[" → ".join(ends)]
            assert f" layer {origin.src_layer} → {origin.dst_layer}" in label
            held = [spans_text("token", [*origin.tokens])]
            held += [spans_text("head", [origin.heads])] if origin.heads else []
            held += [f"({origin.model_layer} of the model)"] if name == "stages" else []
            for it in filter(None, (*held, origin.kv)):
                assert it in label
            assert f"{origin.src_tensor} → {origin.dst_tensor}" in label


def test_everything_can_be_done_by_keys(page: Page) -> None:
    page.open(large())
    for _ in range(12):
        page.press(Keys.TAB)
        if "band" in (page.driver.switch_to.active_element.get_attribute("class") or ""):
            break
    page.until(lambda: "26 runs" in page.focused())
    assert "entries 0..25 of 4,096" in page.focused()
    assert page.detail().startswith("26 runs")
    page.press(Keys.ARROW_RIGHT)
    page.until(lambda: "entries 26..51" in page.focused())
    page.press(Keys.ENTER)  # closer
    page.until(lambda: "entry 26 of 4,096" in page.focused())
    assert len(page.all("#picture .band")) == 26
    page.press(Keys.END)
    page.until(lambda: "entry 51 of 4,096" in page.focused())
    page.press(Keys.ARROW_RIGHT)  # beyond what is shown
    page.until(lambda: "entry 52 of 4,096" in page.focused())
    page.press(Keys.ESCAPE)
    page.until(lambda: "entries 52..77" in page.focused())


def test_the_strip_chooses_a_part_of_the_request(page: Page) -> None:
    page.open(large())
    strip = "#strip svg"
    for keys, shown in (
        ("+", "runs 1,024 to 3,071 of 4,096"),
        (Keys.ARROW_RIGHT, "runs 1,536 to 3,583 of 4,096"),
        (Keys.HOME, "runs 0 to 2,047 of 4,096"),
        ("-", "all 4,096 runs"),
    ):
        page.one(strip).send_keys(keys)
        page.until(lambda shown=shown: shown in page.one("#shown").text)
    drag = ActionChains(page.driver, duration=0).move_to_element_with_offset(
        page.one(strip), 100, 0
    )
    drag.click_and_hold().move_by_offset(20, 0).release().perform()
    page.until(lambda: "all 4,096" not in page.one("#shown").text)
    assert 60 <= len(page.all("#picture .band")) <= 75  # 20 pixels of some 1,200


def test_a_block_is_found_among_thousands(page: Page) -> None:
    plan = large()
    assert plan.part.tables is not None
    src, dst = (int(it[1234]) for it in plan.part.tables[:2])
    page.open(plan)
    page.one("#block").send_keys(f"{src}{Keys.ENTER}")
    page.until(lambda: f"block {src} → block {dst}" in page.detail())
    assert "entry 1234 of 4,096" in page.detail()
    assert f"block {src} → block {dst}." in page.focused()
    assert page.one("#answer").text.startswith(f"Source block {src}")
    missing = next(
        it
        for it in range(8192)
        if it not in plan.part.tables.src and it not in plan.part.tables.dst
    )
    page.one("#block").clear()
    page.one("#block").send_keys(f"{missing}{Keys.ENTER}")
    page.until(lambda: page.one("#answer").text.startswith(f"No block {missing} at the source"))
    page.one("#all").click()
    page.until(lambda: "all 4,096 runs" in page.one("#shown").text)


def test_runs_that_were_joined_are_not_said_to_be_one(page: Page) -> None:
    """A mark of them knows its first and last blocks, and not which lie between."""
    rng = np.random.default_rng(1)
    desc = CacheDesc(2, (1 << 16, 1, 1, 8), FP16, kv_tensor_format="NHD")
    src, dst = (rng.permutation(1 << 16)[:20_000] for _ in range(2))
    plan = kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst)), local="dst")
    assert plan.part.tables is not None
    assert plan.part.segments.num_runs > 16384
    page.open(plan)
    assert f"all {plan.part.segments.num_runs:,} runs, 126 neighbours" in page.one("#shown").text
    page.one("#block").send_keys(f"{plan.part.tables.src[7]}{Keys.ENTER}")
    page.until(lambda: "were joined to be drawn" in page.one("#answer").text)
    page.one("#strip svg").send_keys("+")
    page.until(lambda: " of 10,000, " in page.one("#shown").text)


def test_a_difference_is_read_without_colour(page: Page) -> None:
    page.open(SMALL, diff=SWAPPED)
    assert page.one("#verdict").text == (
        "different bytes - 262,144 destination bytes from another source: src_blocks[0] and "
        "src_blocks[1] are swapped (4 and 5)"
    )
    said = page.labels()
    assert [it.partition(".")[0] for it in said] == [
        "in both plans: block 9 → block 2",
        "only in the old plan: blocks 4–5 → blocks 7–8",
        "only in the new plan: block 5 → block 7",
        "only in the new plan: block 4 → block 8",
    ]
    dashes = {
        name: page.one(f"#picture .band.{name} .ribbon").value_of_css_property("stroke-dasharray")
        for name in ("old", "new", "same")
    }
    assert dashes["old"] != "none"
    assert dashes["new"] == dashes["same"] == "none"
    assert {it.text for it in page.all("text.end")} == {"2", "− 0–1", "+ 0", "+ 1"}
    assert "hatched" in page.one("#legend").text


def test_changes_are_found_among_thousands(page: Page) -> None:
    plan = large()
    assert plan.part.tables is not None
    src = plan.part.tables.src.copy()
    src[[100, 2000]] = src[[2000, 100]]
    page.open(
        plan,
        diff=kvplan.plan(
            Transfer(Rows(plan.part.src, src), Rows(plan.part.dst, plan.part.tables.dst)),
            local="dst",
        ),
    )
    seen = []
    for _ in range(5):
        page.one("#change").click()
        page.until(lambda: page.focused() not in seen)
        page.until(lambda: page.focused().startswith("only in the "))
        seen.append(page.focused())
        if len(seen) == 4:
            break
    assert [it.split(" plan")[0] for it in seen] == ["only in the old", "only in the new"] * 2
    assert [
        f"entry {it} " in said for it, said in zip([100, 100, 2000, 2000], seen, strict=True)
    ] == [True] * 4


def test_groups_are_chosen_and_their_names_are_only_text(page: Page) -> None:
    page.open(joined({EVIL: SMALL, "indexer": unlike()}))
    assert [it.text for it in page.all("#tabs button")] == [EVIL, "indexer"]
    assert page.all("img") == []
    assert page.driver.title.startswith("<Plan pull_groups")
    page.all("#tabs button")[0].send_keys(Keys.ARROW_RIGHT)
    page.until(lambda: "80 KiB in 320 descriptors" in page.one("#group").text)
    assert [it.text for it in page.all(".axis.odd")] == [
        "≠ token 16", "≠ head 2", "≠ head 4", "≠ token 32"
    ]  # fmt: skip
    assert "Transposing" in page.one("#notes").text
    page.point_at(label(page, "16–31"))
    page.until(lambda: "block 9 → block 3" in page.detail())
    assert "heads 2..3" in page.detail()


DRAWN = """
const paths = [...document.querySelectorAll("#picture .ribbon")].map((it) => it.getAttribute("d"));
return paths.join("").split("M").length - 1;
"""
FILLS = """
const box = document.getElementById("picture");
return innerWidth === arguments[0] && box.firstChild.viewBox.baseVal.width === box.clientWidth;
"""


def test_every_band_is_drawn_and_all_again_where_the_window_changes(page: Page) -> None:
    for plan, bands in ((SMALL, 2), (unlike(), 3), (large(), 4096)):
        page.open(plan)
        for width in (1280, 700):
            page.size(width)
            page.until(lambda width=width: page.driver.execute_script(FILLS, width))
            assert page.driver.execute_script(DRAWN) == bands


def test_it_works_in_a_notebooks_cell(page: Page) -> None:
    page.show(f"<!doctype html><style>main, h1 {{ display: none }}</style>{SMALL._repr_html_()}")
    page.driver.switch_to.frame(page.one("iframe"))
    assert page.one("h1").is_displayed()
    page.one("#block").send_keys(f"9{Keys.ENTER}")
    page.until(lambda: "block 9 → block 2" in page.detail())
    page.driver.switch_to.default_content()


OVERLAPS = """
const found = [], texts = [...document.querySelectorAll("svg text")];
const boxes = texts.map((it) => [it.textContent, it.getBoundingClientRect()]);
const meet = (p, q) => p.left + 1 < q.right && q.left + 1 < p.right
  && p.top + 2 < q.bottom && q.top + 2 < p.bottom;
for (const [a, p] of boxes) {
  for (const [b, q] of boxes) if (p !== q && meet(p, q)) found.push(`${a} and ${b}`);
  if (p.left < -1 || p.right > innerWidth + 1) found.push(`${a} is cut`);
}
if (document.documentElement.scrollWidth > innerWidth) found.push("the page is too wide");
return found;
"""


@pytest.mark.parametrize("width", [1280, 700, 380])
def test_nothing_overlaps_and_nothing_is_cut(page: Page, width: int) -> None:
    desc = CacheDesc(64, (100_000, 16, 8, 128), FP16, kv_tensor_format="NHD")
    rng = np.random.default_rng(3)
    runs = [np.arange(5000 * it, 5000 * it + 30) for it in (1, 2)]
    src, dst = (np.concatenate([rng.permutation(5000)[:70], it]) for it in runs)
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
const words = "h1, h2, p, li, th, td, output, .axis, .legend span, svg text:not(.end)";
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


def test_no_page_asked_for_anything_or_complained(page: Page) -> None:
    """Of all pages that the tests before this one have opened, and one more."""
    page.open(large(), diff=unlike())
    page.until(lambda: page.all("#picture .band"))
    assert page.driver.get_log("browser") == []
    assert {it.partition(":")[0] for it in requests(page)} <= {"file", "data"}
    page.show('<!doctype html><img src="http://127.0.0.1:9/picture.png">')  # would be seen
    page.until(lambda: "http://127.0.0.1:9/picture.png" in requests(page))


def requests(page: Page) -> list[str]:
    """What documents of ours have asked for since the last call; the first tab is the browser's."""
    events = [json.loads(it["message"])["message"] for it in page.driver.get_log("performance")]
    sent = [it["params"] for it in events if it["method"] == "Network.requestWillBeSent"]
    return [it["request"]["url"] for it in sent if not it["documentURL"].startswith("chrome")]
