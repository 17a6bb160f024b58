"""Looks at the dashboard as somebody with a browser does, and uses its controls if the token allows.

Arguments: the daemon's URL, a VM's name, a file with the token, what the token allows (`read` or
`control`), a directory for pictures, and the processes of three VMs: of the named one, of one of
256 MiB that is not managed, and of one that cannot be. It fails at the first thing that is not as
it should be.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from pathlib import Path
from typing import Dict, List

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

PARTS = ["in-use", "free", "compressed", "swapped", "disk-backed", "empty"]
PATIENCE_MS = 60_000
LOOK_EVERY_MS = 100
PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 900}
# A browser logs each refusal and each lost connection; the page is about to say the same.
EXPECTED = re.compile(r"status of (400|401|422)|ERR_INTERNET_DISCONNECTED")


class Look:
    """A page, and what went wrong in it."""

    def __init__(self, browser: Browser, url: str, name: str, pictures: Path) -> None:
        self.url, self.name, self.pictures = url, name, pictures
        self.context = browser.new_context(
            ignore_https_errors=True, viewport=DESK, color_scheme="light", reduced_motion="reduce"
        )
        self.context.set_default_timeout(PATIENCE_MS)
        self.page: Page = self.context.new_page()
        self.wrong: List[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("request", self._request)
        self.row = self.page.locator(f'#vms-body tr[data-vm="{name}"]')

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not EXPECTED.search(message.text):
            self.wrong.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith((self.url + "/", "data:")):
            self.wrong.append(f"asks {request.url}")

    def id(self, name: str):
        return self.page.locator(f"#{name}")

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)

    def check(self) -> None:
        assert not self.wrong, self.wrong

    def picture(self, name: str) -> None:
        # To hide the caret, Playwright would change styles of the page, which its policy forbids.
        self.page.screenshot(path=self.pictures / f"dashboard-{name}.png", caret="initial")

    def fits(self, width: int) -> None:
        """Nothing is wider than the page: a picture of all of it has its width."""
        picture = self.page.screenshot(full_page=True, caret="initial")
        found = struct.unpack(">I", picture[16:20])[0]
        assert found == width, f"the page is {found} pixels wide, and the window {width}"


def enter(look: Look, token: str) -> None:
    """The page asks for a token until it has one that the daemon knows."""
    look.page.goto(look.url + "/")
    dialog = look.id("token")
    expect(dialog).to_contain_text("only if they show a token")
    for wrong, why in [("short", "This is no token"), ("0" * 32, "this token is not known")]:
        look.id("token-field").fill(wrong)
        look.press("Enter")
        expect(dialog).to_contain_text(why)
        expect(dialog).to_be_visible()
    look.id("token-field").fill(token)
    look.press("Enter")
    expect(look.row).to_be_visible()
    expect(dialog).to_be_hidden()
    expect(look.page).to_have_url(re.compile(r"/dashboard/$"))


def columns_add_up(look: Look) -> None:
    """The six parts of the VM are its size, once all of them are known."""
    for part in [*PARTS, "size"]:
        cell = look.row.locator(f'[data-key="{part}"]')
        expect(cell).to_have_attribute("data-value", re.compile(r"^\d+$"))
    figures: Dict[str, int] = {}
    # All cells of one moment. A VM that is slow to answer may have unknown figures again by then.
    for _ in range(PATIENCE_MS // LOOK_EVERY_MS):
        cells = re.findall(r'data-key="([^"]+)"[^>]*? data-value="(\d+)"', look.row.inner_html())
        figures = {key: int(value) for key, value in cells}
        if figures.keys() >= {*PARTS, "size"}:
            break
        look.page.wait_for_timeout(LOOK_EVERY_MS)
    assert sum(figures[part] for part in PARTS) == figures["size"] == 512 << 20, figures
    expect(look.row.locator("svg.bar")).to_have_attribute("aria-label", re.compile("in use .*empty"))


def times_of_faults(look: Look, place: str) -> None:
    """The history has how long faults took that were over before the page was opened."""
    figure = look.page.locator(f"{place} figure", has_text="Time from a fault to its answer")
    for css in ("median", "slowest"):
        expect(figure.locator(f"path.{css}")).to_have_attribute("d", re.compile("^M"))


def not_managed(look: Look, managed: str, free: str, stuck: str) -> None:
    """VMs that are not managed have a row of their own, which says what to do about them."""
    row = look.page.locator(f'#others-body tr[data-pid="{free}"]')
    figures: Dict[str, int] = {}
    for key in ("size", "used", "free", "reclaimable"):
        cell = row.locator(f'[data-key="{key}"]')
        expect(cell).to_have_attribute("data-value", re.compile(r"^\d+$"))
        figures[key] = int(cell.get_attribute("data-value") or "")
    assert figures["size"] == 256 << 20, figures
    assert 0 < figures["used"] < figures["size"], figures
    assert figures["reclaimable"] <= figures["free"] < figures["size"], figures
    name = row.locator(".name").inner_text()
    expect(row.locator("code")).to_have_text(f"ebb attach --name {name} --pid {free}")
    note = look.page.locator(f'#others-body tr[data-pid="{stuck}"] .note')
    expect(note).to_contain_text("Ebb cannot manage it: its RAM is no shared memfd: start QEMU")
    expect(look.page.locator(f'#others-body tr[data-pid="{managed}"]')).to_have_count(0)


def keys(look: Look) -> None:
    look.press("/")
    expect(look.id("filter")).to_be_focused()
    look.page.keyboard.type("no-such-name")
    expect(look.row).to_have_count(0)
    look.press("Escape")
    expect(look.row).to_be_visible()
    look.press("?")
    expect(look.id("help")).to_be_visible()
    look.press("Escape")
    expect(look.id("help")).to_be_hidden()
    size = look.page.locator("#vms-head th", has_text="Size")
    size.locator("button").focus()
    look.press("Enter")
    expect(size).to_have_attribute("aria-sort", "descending")
    look.row.locator("a").focus()
    look.press("Enter")
    title = look.id("vm-title")
    expect(title).to_have_text(look.name)
    expect(title).to_be_focused()
    chart = look.page.locator("#vm svg.chart").first
    expect(chart.locator("path.area").first).to_have_attribute("d", re.compile("^M"))
    chart.focus()
    look.press("ArrowLeft")
    expect(look.page.locator("#vm output").first).to_have_text(re.compile(r"^At .*in use"))
    look.press("Escape")
    expect(look.id("overview")).to_be_visible()
    expect(look.row.locator("a")).to_be_focused()


def colours_and_widths(look: Look) -> None:
    body = look.page.locator("body")
    expect(body).to_have_css("background-color", "rgb(255, 255, 255)")
    look.picture("light")
    look.page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    expect(body).to_have_css("background-color", "rgb(20, 23, 28)")
    look.picture("dark")
    look.id("theme").click()
    expect(body).to_have_css("background-color", "rgb(255, 255, 255)")
    for _ in range(2):
        look.id("theme").click()
    expect(body).to_have_css("background-color", "rgb(20, 23, 28)")
    look.page.emulate_media(color_scheme="light", reduced_motion="reduce")
    expect(look.page.locator(".bar rect").first).to_have_css("transition-duration", "0s")
    look.fits(DESK["width"])
    look.page.set_viewport_size(PHONE)
    look.fits(PHONE["width"])
    for head in ("vms-head", "others-head"):
        expect(look.id(head)).to_be_hidden()
    expect(look.page.locator("#others-body tr").first).to_be_visible()
    look.picture("phone")
    look.row.locator("a").click()
    expect(look.id("vm-title")).to_be_visible()
    look.fits(PHONE["width"])
    look.press("Escape")
    look.page.set_viewport_size(DESK)


def silence(look: Look) -> None:
    """A daemon that is away is told, with the age of the figures, and found again."""
    look.context.set_offline(True)
    expect(look.id("trouble")).to_contain_text("No answer from ebbd")
    expect(look.id("age")).to_contain_text("old")
    look.context.set_offline(False)
    expect(look.id("trouble")).to_be_hidden()
    expect(look.id("age")).not_to_contain_text("old")


def only_looks(look: Look) -> None:
    expect(look.id("role")).to_have_text("may look")
    look.row.locator("a").click()
    expect(look.id("vm-title")).to_have_text(look.name)
    for control in ("#hold", "#set-limit", "#pilot-modes button"):
        expect(look.page.locator(control)).to_have_count(0)
    expect(look.page.get_by_role("button", name="Monitor")).to_have_count(0)
    times_of_faults(look, "#vm")
    expect(look.page.locator("#vm .figures")).to_contain_text(re.compile(r"half within \d"))


def decides(look: Look) -> None:
    """The pilot decides about the VM, and only shows it."""
    decision = look.page.locator("#vm ol.events li", has_text="of free memory").first
    expect(decision).to_contain_text("not done: dry run")


def monitors(look: Look) -> None:
    """A monitoring gives the heat map."""
    heat = look.page.locator("#vm svg.heat")
    look.page.get_by_role("button", name="Monitor").click()
    expect(look.id("done")).to_have_text(f"{look.name} is monitored.")
    expect(heat).to_have_attribute("aria-label", re.compile(r"^Heat map, \S+ a cell\."))
    expect(heat).to_be_visible()
    expect(heat.locator("rect").first).to_have_attribute("class", re.compile(r"^heat-[0-7]$"))
    expect(look.page.locator("#vm")).to_contain_text("were used, and")


def controls(look: Look) -> None:
    expect(look.id("role")).to_have_text("may look and control")
    expect(look.page.locator("#pilot-modes button")).to_have_count(3)
    look.page.locator("#pilot-modes button", has_text="dry run").click()
    look.id("confirm").get_by_role("button", name="No", exact=True).click()
    expect(look.id("pilot-says")).to_have_text("The pilot is off.")
    look.page.locator("#pilot-modes button", has_text="dry run").click()
    look.id("confirm").get_by_role("button", name="Yes", exact=True).click()
    expect(look.id("pilot-says")).to_contain_text("The pilot: dry run")
    look.row.locator("a").click()
    decides(look)
    monitors(look)
    look.id("hold").click()
    expect(look.id("done")).to_contain_text(f"{look.name} is held")
    expect(look.id("hold")).to_have_text("Unhold")
    for text, why in [("much", "Not done: much is no size"), ("1M", "Not done: (?!much)")]:
        limit(look, text)
        expect(look.id("done")).to_have_text(re.compile(f"^{why}"))
    limit(look, "400M")
    expect(look.id("done")).to_have_text(f"{look.name} has a limit of 400M.")
    # The refusal is among the events of the VM.
    expect(look.page.locator("#events-list .refusal").first).to_be_visible()
    look.picture("vm")
    look.press("Escape")
    expect(look.id("overview")).to_be_visible()


def limit(look: Look, text: str) -> None:
    """Asks for a limit. What is no size is refused before it is asked for."""
    look.id("set-limit").click()
    look.id("limit-field").fill(text)
    look.id("limit").get_by_role("button", name="Set", exact=True).click()
    if text[0].isdigit():
        look.id("confirm").get_by_role("button", name="Yes", exact=True).click()


def main() -> None:
    url, name, token_file, role, pictures, managed, free, stuck = sys.argv[1:]
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["EBB_BROWSER"])
        look = Look(browser, url, name, Path(pictures))
        enter(look, Path(token_file).read_text().strip())
        columns_add_up(look)
        not_managed(look, managed, free, stuck)
        # Whatever the other steps took, it has these faults.
        look.id("span").select_option(label="15 minutes")
        times_of_faults(look, "#past-charts")
        if role == "control":
            look.id("span").select_option(label="2 minutes")
            controls(look)
            keys(look)
            colours_and_widths(look)
            silence(look)
        else:
            only_looks(look)
        look.check()
        browser.close()


if __name__ == "__main__":
    main()
