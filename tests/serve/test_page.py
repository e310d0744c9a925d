"""The page in a real Chromium: it continues prompts, shows probabilities, compares two models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import By, WebDriverWait, chromium, webdriver
from tests.support.llamas import write_confident
from tests.support.served import Served, served


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.fixture(scope="module")
def two(tiny: Path, chat_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory):
    """A server of two models."""
    other = write_confident(tmp_path_factory.mktemp("other"), vocab_size=400, context=32)
    with served({"small": tiny, "other": other}, chat_tokenizer) as running:
        yield running


def set_value(browser: webdriver.Chrome, name: str, value: object) -> None:
    script = "document.getElementById(arguments[0]).value = arguments[1]"
    browser.execute_script(script, name, str(value))


def send(browser: webdriver.Chrome, prompt: str, **settings: object) -> list[Any]:
    """Continue a prompt; return the sections of the result, once all have ended."""
    for name, value in {"prompt": prompt, **settings}.items():
        set_value(browser, name, value)
    browser.find_element(By.ID, "send").click()
    WebDriverWait(browser, 60).until(
        lambda _: (
            browser.find_element(By.ID, "send").is_enabled()
            and browser.find_elements(By.CSS_SELECTOR, ".result small:not(:empty)")
        )
    )
    return browser.find_elements(By.CSS_SELECTOR, ".result")


def open_page(browser: webdriver.Chrome, server: Served) -> None:
    browser.get(server.url)
    WebDriverWait(browser, 60).until(lambda _: browser.find_elements(By.CSS_SELECTOR, "option"))


def test_tokens_have_probabilities_and_alternatives(
    browser: webdriver.Chrome, server: Served
) -> None:
    open_page(browser, server)
    assert not browser.find_element(By.ID, "second").is_displayed()
    body = {"prompt": "def main", "max_tokens": 10, "temperature": 0, "logprobs": 5}
    (choice,) = server.complete(**body)["choices"]
    (result,) = send(browser, "def main", max_tokens=10, temperature=0)
    tokens = result.find_elements(By.CSS_SELECTOR, ".token")
    assert [token.get_property("textContent") for token in tokens] == choice["logprobs"]["tokens"]
    for token, score in zip(tokens, choice["logprobs"]["token_logprobs"], strict=True):
        probability = float(token.get_attribute("data-probability"))
        assert probability == pytest.approx(2.718281828459045**score, rel=1e-6)
    webdriver.ActionChains(browser).move_to_element(tokens[0]).perform()
    rows = browser.find_elements(By.CSS_SELECTOR, "#detail tr")
    # Tokens whose texts are equal, such as parts of characters, share a row.
    assert len(rows) == len(choice["logprobs"]["top_logprobs"][0]) > 1
    cells = [row.find_elements(By.CSS_SELECTOR, "td")[-1].text for row in rows]
    shares = [float(cell.removesuffix(" %")) for cell in cells]
    assert shares == sorted(shares, reverse=True)
    best = max(choice["logprobs"]["top_logprobs"][0].values())
    assert shares[0] == pytest.approx(100 * 2.718281828459045**best, abs=0.01)
    assert f"{len(tokens)} new tokens in" in result.text
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def test_the_prompt_can_be_scored(browser: webdriver.Chrome, server: Served) -> None:
    open_page(browser, server)
    browser.find_element(By.ID, "echo").click()
    (result,) = send(browser, "The list", max_tokens=3, temperature=0)
    prompt = result.find_elements(By.CSS_SELECTOR, ".token.prompt")
    assert "".join(token.get_property("textContent") for token in prompt) == "The list"
    assert prompt[0].get_attribute("data-probability") is None
    assert all(token.get_attribute("data-probability") for token in prompt[1:])


def test_two_models_stand_side_by_side(browser: webdriver.Chrome, two: Served) -> None:
    open_page(browser, two)
    results = send(browser, "def ", max_tokens=6, temperature=0)
    texts = {}
    for result in results:
        tokens = result.find_elements(By.CSS_SELECTOR, ".token")
        name = result.find_element(By.CSS_SELECTOR, "h2").text
        texts[name] = "".join(token.get_property("textContent") for token in tokens)
    for name, text in texts.items():
        body = {"prompt": "def ", "max_tokens": 6, "temperature": 0, "model": name}
        assert two.complete(**body)["choices"][0]["text"] == text
    assert {*texts} == {"small", "other"}


def test_mistakes_and_text_are_shown_as_they_are(browser: webdriver.Chrome, server: Served) -> None:
    open_page(browser, server)
    (result,) = send(browser, "def ", max_tokens=1000)
    error = result.find_element(By.CSS_SELECTOR, ".error")
    assert error.text.startswith("max_tokens: 1000: too many after a prompt of")
    browser.find_element(By.ID, "echo").click()
    (result,) = send(browser, "<b>bold</b>", max_tokens=1)
    assert not result.find_elements(By.CSS_SELECTOR, "b")
    assert "<b>bold</b>" in result.find_element(By.CSS_SELECTOR, ".tokens").text


def test_a_server_with_a_token_asks_for_it(
    browser: webdriver.Chrome, tiny: Path, sampled: Path
) -> None:
    with served({"tiny": tiny}, sampled / "tokenizer", token="secret") as guarded:
        browser.get(guarded.url)
        token = browser.find_element(By.ID, "token")
        WebDriverWait(browser, 60).until(lambda _: token.is_displayed())
        assert "no valid token" in browser.find_element(By.ID, "problem").text
        token.send_keys("secret\t")
        WebDriverWait(browser, 60).until(lambda _: browser.find_elements(By.TAG_NAME, "option"))
        assert not browser.find_element(By.ID, "problem").is_displayed()
        (result,) = send(browser, "The", max_tokens=2)
        assert result.find_elements(By.CSS_SELECTOR, ".token")
