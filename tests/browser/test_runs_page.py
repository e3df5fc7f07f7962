"""The list of runs: live, searchable, paged, and windowed when long. Names are text, whatever they hold."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from playwright.sync_api import Page, expect

from gradiometer import wire
from tests.browser.dashboard import begin_run, send_scalars, whole_run
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import exit_event, frame, scalar_schema

pytestmark = pytest.mark.browser

NAMES = ("train/loss",)
HOSTILE = "<img src=x onerror=\"document.title='taken'\">"


def half(name: str, step: int) -> float:
    return 0.5


def post_run(url: str, index: int) -> None:
    """One finished run through the HTTP fallback."""
    run = wire.RunInfo(
        run_id=f"r{index:04d}", project="many", name=f"run {index:04d}", created_s=1_700_000_000.0 + index
    )
    source = wire.SourceInfo(rank=0, attempt=1_700_000_000_000)
    hello = wire.Hello(protocol=wire.PROTOCOL_VERSION, agent_version="test", run=run, sources=(source,))
    records = wire.Records(
        rank=0,
        attempt=source.attempt,
        first_seq=1,
        records=(scalar_schema("train/loss"), frame({1: [0.5]}), exit_event(0)),
    )
    body = wire.encode(wire.Batch(hello=hello, records=(records,)))
    answer = httpx.post(
        f"{url}/api/v1/ingest", content=body, headers={"content-type": "application/msgpack"}, timeout=30
    )
    assert answer.status_code == 200, answer.text


def test_the_empty_list_shows_how_to_start(server: Callable[..., Server], page: Page) -> None:
    one = server()
    page.goto(one.url)
    expect(page.get_by_role("heading", name="No runs yet")).to_be_visible()
    loop = page.locator("pre").inner_text()
    assert "import gradiometer as gm" in loop
    compile(loop, "loop", "exec")


def test_a_new_run_and_its_progress_appear_without_a_reload(
    server: Callable[..., Server], page: Page
) -> None:
    one = server()
    page.goto(one.url)
    expect(page.get_by_role("heading", name="No runs yet")).to_be_visible()
    expect(page.locator("[data-connection='live']")).to_be_visible()
    with begin_run(one.url, "first", NAMES) as client:
        row = page.locator("tr[data-run='first']")
        expect(row).to_be_visible()
        expect(row).to_contain_text("running")
        send_scalars(client, NAMES, 1, 30, half)
        expect(row.locator("td").nth(3)).to_have_text("30")
        expect(row.locator("td").nth(4)).to_have_text("0.5")
        client.send(exit_event(0))
        expect(row).to_contain_text("finished")
    row.get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("first")
    page.go_back()
    expect(row).to_be_visible()


def test_hundreds_of_runs_are_paged_windowed_and_searched(server: Callable[..., Server], page: Page) -> None:
    one = server()
    for index in range(230):
        post_run(one.url, index)
    page.goto(one.url)
    rows = page.locator("tr[data-run]")
    expect(rows.first).to_have_attribute("data-run", "r0229")
    assert rows.count() < 60
    more = page.get_by_role("button", name="Load more")
    for shown in ("200+ runs", "230 runs"):
        more.scroll_into_view_if_needed()
        more.click()
        expect(page.locator(".count")).to_have_text(shown)
    expect(more).to_have_count(0)
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    expect(page.locator("tr[data-run='r0000']")).to_be_visible()
    assert rows.count() < 60
    page.get_by_role("searchbox").fill("run 0042")
    expect(rows).to_have_count(1)
    expect(rows.first).to_have_attribute("data-run", "r0042")
    page.get_by_role("searchbox").fill("")
    page.get_by_role("combobox").select_option("running")
    expect(page.get_by_role("heading", name="No run matches")).to_be_visible()


def test_hostile_names_are_text_everywhere(server: Callable[..., Server], page: Page) -> None:
    one = server()
    layers = [("<b>fc</b>.weight", 10), ("<a href='javascript:0'>x</a>", 10)]
    with begin_run(one.url, HOSTILE, [HOSTILE + "/loss", HOSTILE + "/two"], layers) as client:
        send_scalars(client, ["a", "b"], 1, 10, half)
    page.goto(one.url)
    page.get_by_role("link", name=HOSTILE).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
    card = page.locator("figure[data-metric]").first
    expect(card).to_have_attribute("data-last-step", "10")
    assert page.locator("main img").count() == 0
    assert page.title().startswith("<img")


def test_the_page_works_on_a_deep_link_and_says_what_is_missing(
    server: Callable[..., Server], page: Page
) -> None:
    one = server()
    whole_run(one.url, "team/run 1?", NAMES, 10, half)
    page.goto(f"{one.url}/runs/team%2Frun%201%3F")
    expect(page.get_by_role("heading", level=1)).to_have_text("team/run 1?")
    page.goto(f"{one.url}/runs/nobody")
    expect(page.get_by_role("heading", name="This run could not be loaded")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("nobody")


def test_a_missing_cookie_leads_to_the_sign_in_form(server: Callable[..., Server], page: Page) -> None:
    one = server(environment={"GRADIOMETER_TOKEN": "a-token-of-some-length-0123456789"})
    page.goto(one.url)
    page.locator("input[type='password']").fill("a-token-of-some-length-0123456789")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="No runs yet")).to_be_visible()
    page.context.clear_cookies()
    page.get_by_role("searchbox").fill("x")
    expect(page.locator("input[type='password']")).to_be_visible()
    eventually(lambda: page.locator("input[type='password']").count() == 1, 5)


def test_the_page_works_under_a_path_prefix(server: Callable[..., Server], page: Page) -> None:
    one = server(arguments=["--path-prefix", "/runs/of/ours"])
    whole_run(f"{one.url}/runs/of/ours", "below", NAMES, 10, half)
    refused: list[str] = []
    page.on("response", lambda answer: refused.append(answer.url) if answer.status >= 400 else None)
    page.goto(f"{one.url}/runs/of/ours/")
    page.get_by_role("link", name="below").click()
    assert page.url == f"{one.url}/runs/of/ours/runs/below"
    page.reload()
    expect(page.locator("figure[data-metric='train/loss']")).to_have_attribute("data-last-step", "10")
    expect(page.locator("[data-connection='live']")).to_be_visible()
    assert refused == []
