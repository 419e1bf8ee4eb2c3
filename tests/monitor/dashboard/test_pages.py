"""The pages in a real browser: they show what Redis says, live, whatever is written there."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from helpers.commands import Started
from helpers.dashboards import Dashboard, dashboard
from helpers.experience import experienced
from helpers.harness import aggregating, model

from kvps.job import Job
from kvps.protocol.phases import SHARD_PHASES, WORKER_PHASES
from kvps.store import Store

pytestmark = pytest.mark.slow  # a browser is started
WORKER = """
import sys, time
import numpy as np
import kvps
url, name, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
with kvps.connect(url) as store, store.job("j").join(name) as session:
    print("joined", flush=True)
    for number in range(rounds):
        weights = session.pull()
        time.sleep(0.1)
        session.push({n: np.ones_like(w) for n, w in weights.items()}, loss=1 / (number + 1))
"""
TILE = "dl.tiles > div:has(dt:text-is('{}')) dd"
HOSTILE = "<img src=/x onerror=window.hacked=1><script>window.hacked=1</script>"
ME = {"host": "here", "pid": 1, "start": "", "space": "", "device": "cpu"}

COLOURED = """(lanes) => {
  const canvas = document.querySelector(".lanes canvas");
  if (!canvas.width) return false;
  const ratio = window.devicePixelRatio, pen = canvas.getContext("2d"), left = 110 * ratio;
  const colourful = (r, g, b, a) => a === 255 && Math.max(r, g, b) - Math.min(r, g, b) > 80;
  for (let lane = 0; lane < lanes; lane += 1) {
    const {data} = pen.getImageData(left, (lane * 24 + 12) * ratio, canvas.width - left, 1);
    let found = false;
    for (let i = 0; i < data.length; i += 4) found ||= colourful(...data.slice(i, i + 4));
    if (!found) return false;
  }
  return true;
}"""
"""Whether each of the first lanes has pixels in the colour of a phase."""
"""Whether the table shows all of a text: a cell cuts what is a fraction of a pixel wider."""
NAMES_ARE = """(names) => {
  const links = [...document.querySelectorAll(".rows .row:not([hidden]) .worker a")];
  return links.map((link) => link.textContent).join() === names.join();
}"""
"""Whether the table has rows of these workers, and no more."""


@pytest.fixture
def shown(store: Store) -> Iterator[Dashboard]:
    with dashboard(store.url) as found:
        yield found


@contextmanager
def working(store: Store, names: list[str], rounds: int = 10_000) -> Iterator[dict[str, Started]]:
    """Workers of job j as processes of their own, which have joined."""
    found = {name: Started([sys.executable, "-c", WORKER, store.url, name, str(rounds)]) for name in names}
    try:
        for each in found.values():
            each.until("joined")
        yield found
    finally:
        for each in found.values():
            if each.process.poll() is None:
                each.end(signal.SIGKILL)


def text_is(page: Any, selector: str, text: str) -> None:
    """Wait until the first element that fits has this text."""
    page.wait_for_function(
        "([selector, text]) => document.querySelector(selector)?.textContent === text", arg=[selector, text]
    )


def tile(page: Any, title: str, value: str) -> None:
    page.locator(TILE.format(title)).filter(has_text=value).wait_for()


def test_the_pages_agree_with_redis(store: Store, shown: Dashboard, raw: Any, tab: Any) -> None:
    job = store.create_job("j", model(), workers=2, shards=2, staleness=1)
    page = tab.open(f"{shown.root}/")
    page.get_by_role("link", name="j", exact=True).click()
    tile(page, "Workers", "0 of 2")
    with aggregating(job):
        with working(store, ["w0", "gpu-1.a=b"], rounds=8) as workers:
            for each in workers.values():
                assert each.wait() == 0
        text_is(page, ".heading .pill", "finished")
        job.report(3, {"loss": 0.25, "far": float("inf")}, by="me")
        page.get_by_text("evaluation of version 3: loss 0.25, far inf, by me", exact=True).wait_for()
        page.locator(".event.evaluate", has_text="version 3: loss 0.25, far not finite, by me").wait_for()
        k = job.access.keys
        tile(page, "Version", raw.hget(k.version, "version").decode())
        tile(page, "Backlog", str(raw.xlen(k.inbox)))
        tile(page, "Contributions", "16")
        tile(page, "Progress", "100 %")
        page.get_by_text("16 contributions in ").wait_for()
        clocks = {name.decode(): clock.decode() for name, clock in raw.hgetall(k.clock).items()}
        assert clocks == {"w0": "8", "gpu-1.a=b": "8"}
        for name, clock in clocks.items():
            row = page.locator(".rows .row", has=page.get_by_role("link", name=name, exact=True))
            row.locator(".clock", has_text=clock).wait_for()
            row.locator(".pill", has_text="finished").wait_for()
        holders = page.locator("td[data-title=Holder]").all_inner_texts()
        assert holders == [raw.get(k.lease(shard)).decode() for shard in (0, 1)]
    store.create_job("other", model())
    page.goto(f"{shown.root}/jobs/j?beside=other")
    page.get_by_text("other: waits for workers").wait_for()
    page.get_by_role("heading", name="Evaluation: loss").wait_for()
    for name in ("smooth", "log"):
        page.get_by_role("button", name=name, exact=True).first.click()
        page.locator("button[aria-pressed=true]", has_text=name).wait_for()
    for axis in ("contributions", "time", "version"):
        page.get_by_label("What the charts are over").select_option(axis)
        page.locator(".chart canvas").nth(5).wait_for()
    page.get_by_text("Settings").click()
    page.locator(".settings div", has_text="staleness_scaling").get_by_text("none").wait_for()
    page.get_by_role("link", name="Whole log").click()
    page.get_by_label("Which events").select_option("workers that came or went")
    page.locator(".event.commit").first.wait_for(state="detached")
    page.locator(".event.join").nth(1).wait_for()
    assert set(page.locator(".event .kind").all_inner_texts()) == {"join", "leave"}
    page.get_by_label("Which events").select_option("all events")
    page.locator(".event.commit").nth(int(raw.hget(k.version, "version")) - 1).wait_for()
    page.locator(".event.join").nth(1).wait_for()
    assert page.locator(".event.commit").count() == int(raw.hget(k.version, "version"))
    assert page.locator(".event.commit .chip").count() == 16
    staleness = [commit.version - 1 - c.base for commit in job.log() for c in commit.plan.contributions]
    assert page.locator(".chip.stale").count() == staleness.count(3), "the bound allows a staleness of 3"
    assert page.locator(".event.join").count() == 2
    page.goto(f"{shown.root}/jobs/j/workers/gpu-1.a=b")
    page.locator("tbody tr").nth(7).wait_for()
    tile(page, "Committed", "8")
    page.locator(".log .commit").nth(7).wait_for()


def test_the_timeline_draws_each_lane(store: Store, shown: Dashboard, tab: Any) -> None:
    job = store.create_job("j", model(), workers=2, staleness=-1)
    with aggregating(job), working(store, ["w0", "w1"]):
        page = tab.open(f"{shown.root}/jobs/j")
        page.wait_for_function(COLOURED, arg=3)  # shard 0, w0 and w1
        entries = page.locator(".legends .legend").evaluate_all("(all) => all.map((each) => each.children.length - 1)")
        assert entries == [len(WORKER_PHASES) + 1, len(SHARD_PHASES)], "each phase, and silence"
        page.get_by_role("button", name="Pause").click()
        page.get_by_role("button", name="Go on").wait_for()
    tab.said = [line for line in tab.said if "getImageData" not in line]  # this test's own


def test_hostile_text_is_shown_and_never_run(store: Store, shown: Dashboard, raw: Any, tab: Any) -> None:
    job = store.create_job("j", model(), workers=1, staleness=-1)
    job.access.scripts.join("w0", "n", "", {**ME, "host": HOSTILE, "device": HOSTILE})
    job.access.scripts.acquire(0, HOSTILE, 3_600_000, "n1")
    raw.xadd(job.access.keys.commits, {"kind": "reject", "worker": "w0", "round": "1", "reason": HOSTILE})
    other = store.create_job("bad", model())
    raw.hset(other.access.keys.config, "mode", HOSTILE)
    raw.hset(other.access.keys.config, "workers", HOSTILE)
    raw.sadd("kvps:jobs", HOSTILE)
    page = tab.open(f"{shown.root}/")
    page.locator("td.reason", has_text="onerror").first.wait_for()
    for path, words in (("/jobs/j", 3), ("/jobs/j/workers/w0", 2), ("/jobs/j/log", 2)):
        page.goto(shown.root + path)
        page.get_by_text("<img src=/x").nth(words - 2).wait_for()
        assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
        assert page.evaluate("window.hacked") is None
    page.goto(f"{shown.root}/jobs/bad")
    page.locator("#banner", has_text="onerror").wait_for()
    assert page.evaluate("window.hacked") is None


def test_a_removed_job_is_said_and_comes_back(store: Store, shown: Dashboard, tab: Any) -> None:
    store.create_job("j", model(), workers=3)
    page = tab.open(f"{shown.root}/jobs/j")
    tile(page, "Workers", "0 of 3")
    store.remove_job("j")
    page.locator("#banner", has_text="This job is not on the server.").wait_for()
    store.create_job("j", model(), workers=5)
    tile(page, "Workers", "0 of 5")
    page.locator("#banner").wait_for(state="hidden")


def test_the_token_in_the_url_opens_the_pages(store: Store, tab: Any) -> None:
    store.create_job("j", model())
    with dashboard(store.url, "--host", "0.0.0.0") as shown:
        page = tab.open(shown.root + shown.url[shown.url.index("/?token=") :])
        page.get_by_role("link", name="j", exact=True).wait_for()
        assert page.url == f"{shown.root}/", "it is not in the address, and so in no history"
        assert page.evaluate("document.cookie") == ""
        page.get_by_role("link", name="j", exact=True).click()
        tile(page, "Version", "0")
        page.close()  # before the server ends: it would try to connect again, and say so


def _busy(job: Job, workers: int, stop: threading.Event) -> None:
    """Push a round of all workers again and again, with traces and commits, until `stop`."""
    history, term = job.state().history, job.access.scripts.acquire(0, "h", 3_600_000, "n1").term
    version = round_ = 0
    while not stop.is_set():
        round_ += 1
        at = round(1e6 * job.access.server.seconds())
        for number in range(workers):
            trace = f"round {round_} version {version} clock {round_} pulled 32 pushed 32 at {at}"
            trace += f" wait_ms {100 + number % 50} compute_ms {200 + number % 90} loss {1 / round_:.6g}"
            job.access.scripts.push(f"w{number}", "1-n", round_, version, 0, "-", history, traces=[trace])
        while plan := job.access.scripts.plan().plan:
            job.access.scripts.ready(0, term, plan, f"{plan.version:016x}")
            version = plan.version


DRAWN = """
window.drawn = [];
const added = record => [...record.addedNodes].reduce((sum, n) => sum + 1 + (n.querySelectorAll?.('*').length ?? 0), 0);
new MutationObserver(records => drawn.push(records.reduce((sum, record) => sum + added(record), 0)))
  .observe(document.body, {childList: true, subtree: true, characterData: true});
"""  # how many nodes each change of the page has made
GAPS = """() => {
  window.gaps = [];
  let last = performance.now();
  const turn = () => { const now = performance.now(); gaps.push(now - last); last = now; requestAnimationFrame(turn); };
  requestAnimationFrame(turn);
}"""


def test_a_thousand_workers_do_not_stall_the_page(store: Store, shown: Dashboard, tab: Any) -> None:
    """While all rows change, the page draws on: it has a screenful of rows, and makes no more of them anew."""
    job = store.create_job(
        "many", {"x": np.zeros(8, np.float32)}, workers=1000, staleness=2, worker_timeout_ms=3_600_000
    )
    for number in range(1000):
        job.access.scripts.join(f"w{number}", "n", "", ME)
    stop = threading.Event()
    thread = threading.Thread(target=_busy, args=(job, 1000, stop))
    thread.start()
    try:
        page = tab.open(f"{shown.root}/jobs/many")
        tile(page, "Workers", "1,000 of 1,000")
        page.evaluate(GAPS)
        page.evaluate(DRAWN)
        for place in range(0, 36_000, 3600):
            page.evaluate("top => { document.querySelector('.table .scroll').scrollTop = top; }", place)
            page.wait_for_function("frames => gaps.length > frames", arg=20 * (1 + place // 3600))
        version = page.locator(TILE.format("Version"))
        version.filter(has_not_text=re.compile(rf"^{version.inner_text()}$")).wait_for()
        assert page.locator(".rows .row").count() < 25
        page.get_by_role("link", name="w905", exact=True).wait_for()  # what is scrolled to is there, and once
        # Counts, because frames take long on a busy machine. A thousand rows have 27,000 nodes.
        assert 0 < page.evaluate("Math.max(...drawn)") < 2000
    finally:
        stop.set()
        thread.join()
    page.get_by_label("Filter workers").fill("w99")
    page.wait_for_function(NAMES_ARE, arg=["w99", *(f"w99{n}" for n in range(10))])


def test_a_job_with_experience_shows_its_actors_and_what_waits(store: Store, shown: Dashboard, tab: Any) -> None:
    with experienced(store) as (_, quick, _slow):
        page = tab.open(f"{shown.root}/jobs/job")
        for title, value in (("Rollouts waiting", "1"), ("Taken", "2"), ("Dropped", "4"), ("Actors", "2")):
            tile(page, title, value)
        for name, behind, prompt in (("quick", "0", "4"), ("slow", "3", "\u2013")):
            row = page.locator("tr", has=page.get_by_role("rowheader", name=name, exact=True))
            row.locator("td[data-title=Behind]", has_text=behind).wait_for()
            row.locator("td[data-title=Prompt]", has_text=prompt).wait_for()
        page.locator(".event.commit", has_text="loss 0.5, trained on 2 items").wait_for()
        page.locator(".event.stale", has_text="2 items, too old after version 3").wait_for()
        quick.rollouts.put({"reward": 1.0}, version=3)
        tile(page, "Rollouts waiting", "2")
        page.goto(f"{shown.root}/jobs/job/log")
        page.get_by_label("Which events").select_option("what went wrong")
        page.locator(".event.rejected", has_text="2 items after version 1: no advantage").wait_for()
    page.goto(f"{shown.root}/jobs/job")
    tile(page, "Rollouts waiting", "4")
    page.get_by_role("heading", name="Actors").wait_for(state="hidden")
