"""The page at /, in a real browser: type, stream, stop, reload; the keyboard alone; a phone's width."""

import re
import shutil
import time

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def test_the_page_is_one_file_that_asks_nobody_else(server):
    answer = server.http.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.findall(r"(?:src|href)=[\"'](?!data:,)[^\"']+", answer.text)
    assert "http://" not in answer.text
    assert "https://" not in answer.text
    labels = set(re.findall(r'for="(\w+)"', answer.text)) | set(
        re.findall(r'<label>[^<]*<input id="(\w+)"', answer.text)
    )
    fields = set(re.findall(r'<(?:input|textarea) id="(\w+)"', answer.text))
    assert fields == labels


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs chromium; apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright; pip install playwright")
    with sync_api.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
    page.goto(server.url)
    wait(page, "document.getElementById('state').textContent === 'ready'")
    wait(page, "document.getElementById('model').textContent === 'tiny in fp32'")
    yield page
    page.close()
    assert not problems


def wait(page, condition):
    """Wait for a JavaScript expression to hold; playwright's own way needs eval, which the page's policy forbids."""
    end = time.monotonic() + 30
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"{condition}: {page.inner_text('body')}"
        time.sleep(0.02)


def set_field(page, name, value):
    page.evaluate("document.querySelector('details').open = true")
    page.fill(f"#{name}", value)


@pytest.mark.slow
def test_type_stream_reload(page, settled):
    set_field(page, "temperature", "0")
    set_field(page, "max_tokens", "30")
    page.fill("#text", "Tell me")
    page.click("#send")
    wait(page, "document.getElementById('news').textContent === 'Done'")
    answer = page.inner_text("article.assistant div")
    want = settled.chat("Tell me", max_tokens=30).json()["choices"][0]["message"]["content"]
    shown = page.evaluate("document.querySelector('article.assistant div').textContent")
    assert shown == want
    assert answer
    page.reload()
    page.wait_for_selector("article.assistant")
    assert page.evaluate("document.querySelector('article.assistant div').textContent") == want
    assert page.input_value("#max_tokens") == "30"
    page.click("#clear")
    assert page.locator("article").count() == 0


@pytest.mark.slow
def test_the_answer_grows_while_it_streams_and_stop_ends_it(page, settled):
    set_field(page, "max_tokens", "450")
    set_field(page, "temperature", "1")
    settled.wait_until(lambda: settled.stats()["running"] == 0)
    for seed in range(20):  # the model ends an answer itself now and then
        set_field(page, "seed", str(seed))
        page.fill("#text", "x" * seed)
        page.fill("#text", "Go on and on")
        page.click("#send")
        wait(page, "document.querySelector('article.assistant:last-child div')?.textContent.length > 5")
        if page.is_enabled("#stop"):
            page.click("#stop")
            wait(page, "!document.getElementById('send').disabled")
            if page.inner_text("#news") == "Stopped":
                break
    assert page.evaluate("document.getElementById('news').textContent") == "Stopped"
    stopped = page.evaluate("document.querySelector('article.assistant:last-child div').textContent")
    settled.settle()
    assert page.evaluate("document.querySelector('article.assistant:last-child div').textContent") == stopped


@pytest.mark.slow
def test_the_keyboard_is_enough_and_counters_move(page, settled):
    before = page.inner_text("#tokens_per_s")
    page.keyboard.type("Hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    wait(page, "document.getElementById('news').textContent === 'Done'")
    assert page.evaluate("document.querySelector('article.user div').textContent") == "Hello\nthere"
    assert page.evaluate("document.activeElement.id") == "text"
    wait(page, f"document.getElementById('tokens_per_s').textContent !== {before!r}")
    assert re.fullmatch(r"\d+ ms", page.inner_text("#ttft_ms"))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "send"


@pytest.mark.slow
def test_a_mistake_is_shown_and_the_page_goes_on(browser, server):
    page = browser.new_page()
    page.goto(server.url)
    page.fill("#text", "a <|end|> b <b>bold</b>")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.error")
    assert "control token" in page.inner_text("article.error")
    assert page.locator("article.user b").count() == 0  # text stays text
    page.fill("#text", "fine")
    page.keyboard.press("Enter")
    wait(page, "document.getElementById('news').textContent === 'Done'")
    page.close()


@pytest.mark.slow
def test_a_phone_shows_all_of_it(browser, server):
    page = browser.new_page(viewport={"width": 360, "height": 640})
    page.goto(server.url)
    wait(page, "document.getElementById('state').textContent === 'ready'")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for name in ("text", "send", "stop"):
        box = page.locator(f"#{name}").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        assert box["y"] + box["height"] <= 640
    page.close()
