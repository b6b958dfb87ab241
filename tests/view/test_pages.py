"""The pages in a real browser that can reach nothing but the viewer: tables, curves, keys, live, narrow and dark."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from etude.records import Completion, Outcome, Turn
from etude.store import (
    AttemptEnded,
    AttemptRewarded,
    AttemptStarted,
    NoteRecorded,
    RolloutQueued,
    TaskIssued,
    TurnRecorded,
    open_store,
)
from etude.view.export import export_page
from tests.view.browser import READY, Browser, click, texts
from tests.view.made import (
    rollout_events,
    turn,
    write_collapse,
    write_journal,
    write_metrics,
    write_run,
    write_step_replay,
)
from tests.view.pictures import data_url, png
from tests.worlds import make_tokenizer

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
pytestmark = pytest.mark.usefixtures("without_problems")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "first", steps=40)
    write_step_replay(root / "first", changed=True)
    write_run(root / "sweep" / "0-loss-gspo", steps=20)
    start = {"process": 1, "host": "far", "preset": "", "device": "cuda"}
    start |= {"versions": {"torch": "2.9", "numpy": "2.3"}}
    lines = [{"at": 5.0, "began": 0, **start}, {"at": 6.0, "began": 3, **start}]
    lines += [{"at": 9.0, "ended": 20, "how": "failed", "message": HOSTILE}]
    (root / "sweep" / "0-loss-gspo" / "sessions.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    write_retried(root / "retried")
    return root


def write_retried(directory: Path) -> None:
    """Write a run with rollout 99, whose first attempt branched and failed, and whose second is long. Its words are
    hostile."""
    write_run(directory, steps=1, groups=3)
    make_tokenizer(directory / "model")
    ids = np.arange(12_000, dtype=np.int32) % 20
    logp = np.where(np.arange(12_000) == 11_000, -3, -0.01).astype(np.float32)
    text = f'I look. <tool_call>{{"name": "search", "for": "{HOSTILE}"}}</tool_call> Then'
    answer = Completion(ids, logp, np.where(np.arange(12_000) < 1000, 0, 1), "length", text)
    with closing(open_store(directory / "journal.sqlite")) as store:
        images = {"image": data_url(png(40, 30)), "other": [data_url(HOSTILE.encode(), "svg+xml")]}
        fields = {"prompt": HOSTILE, "answer": HOSTILE, **images}
        store.append([TaskIssued(9, 0, "sums", fields), RolloutQueued(99, 9, 0)])
        branched = [turn(2, 0), *(replace(turn(1, 0), prompt=np.array([*range(4), 0, 1, n])) for n in (8, 9))]
        store.append(
            [AttemptStarted(99, 0), *(TurnRecorded(99, 0, replace(t, index=n)) for n, t in enumerate(branched))]
        )
        store.append([AttemptEnded(99, 0, Outcome.INFRA_ERROR, HOSTILE, retry=True)])
        store.append([AttemptStarted(99, 1), TurnRecorded(99, 1, Turn(np.arange(9, dtype=np.int32), answer, 0))])
        span = {"trace_id": "", "span_id": "1", "parent_span_id": "", "name": HOSTILE, "scope": HOSTILE, "kind": 0}
        span |= {"start_ns": 0, "end_ns": 0, "attributes": {HOSTILE: HOSTILE}, "events": [], "status": {"code": 2}}
        store.append([NoteRecorded(99, 1, "span", span)])
        store.append([AttemptRewarded(99, 1, 0.5, {HOSTILE: 0.5}), AttemptEnded(99, 1, Outcome.SUCCEEDED)])


@pytest.mark.smoke
def test_from_the_runs_to_one_run(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.until(f"{READY} && document.querySelectorAll('tbody tr').length == 3")
    assert {"first", "retried", "sweep/0-loss-gspo"} == set(texts(browser, "tbody a")) and "failed" in texts(
        browser, ".status"
    )
    browser.evaluate("document.querySelectorAll('tbody input').forEach(box => box.click())")
    browser.until("document.querySelectorAll('.panel canvas').length >= 3")
    assert "compare=" in browser.evaluate("location.search")
    browser.evaluate("document.querySelector('tbody a[href*=first]').click()")
    browser.until(f"document.querySelector('h1')?.innerText.startsWith('first') && {READY}")
    browser.until("document.querySelectorAll('.panel canvas').length == 4 && document.querySelector('.lanes rect')")
    assert {"reward", "loss", "eval/mean@1", "time/step"} == set(texts(browser, ".metric"))
    dots = "[...document.querySelectorAll('[aria-label=\"time by step\"] .dot')].map(dot => dot.style.background)"
    assert len(set(browser.evaluate(dots))) == len(browser.evaluate(dots)) == 5, "each phase has its own colour"
    assert "evaluated" in " ".join(texts(browser, ".legend span")) and "recipe" in texts(browser, "dt")
    assert browser.evaluate(DRAWN)
    assert len(texts(browser, "[aria-label=steps] tbody a")) == 20
    row = dict(zip(texts(browser, "[aria-label=steps] th"), texts(browser, "[aria-label=steps] td"), strict=False))
    assert (row["reward"], row["change of reward"]) == ("1", "0.0250")
    browser.evaluate("document.querySelector('[aria-label=steps] tbody a').click()")
    browser.until(f"document.querySelector('h1')?.innerText == 'Step 40' && {READY}")
    browser.evaluate("document.querySelector('[aria-label=groups] tbody a').click()")
    browser.until(f"document.querySelector('h1')?.innerText == 'Group of task 195' && {READY}")
    browser.evaluate("document.querySelector('.answer a').click()")
    browser.until(f"document.querySelector('h1')?.innerText.startsWith('Rollout 391') && {READY}")


def test_the_key_and_the_search_find_any_metric(browser: Browser, address: str) -> None:
    browser.open(f"{address}run?run=first")
    browser.until(f"{READY} && document.querySelectorAll('.panel').length == 4")
    browser.press("/")
    browser.type("time/")
    browser.until("document.querySelectorAll('.panel').length == 5")
    assert texts(browser, ".metric") == [
        f"time/{name}" for name in ("step", "collect", "annotate", "update", "publish")
    ]
    assert "metrics=time" in browser.evaluate("location.search")
    browser.press("Escape")
    browser.until("document.querySelectorAll('.panel').length == 4")


def test_curves_are_smoothed_and_drawn_over_time_or_tokens_and_say_which_value_they_show(
    browser: Browser, address: str
) -> None:
    first = "document.querySelector('.panel')"
    browser.open(f"{address}run?run=first&metrics=reward&smooth=20")
    browser.until(f"{READY} && {first}?.innerText.includes('smoothed')")
    assert "1" in texts(browser, ".panel .value > span")[0].split(), "the head of the page has the same number"
    browser.open(f"{address}run?run=first&metrics=reward&smooth=0&x=time&log=true")
    browser.until(f"{READY} && document.querySelectorAll('.panel').length == 1")
    assert texts(browser, ".panel .value") == ["1"]
    browser.evaluate(
        f"(over => {{ const {{ left, top, width }} = over.getBoundingClientRect();"
        "over.dispatchEvent(new MouseEvent('mousemove', { clientX: left + width - 1, clientY: top + 9 })) })"
        f"({first}.querySelector('.u-over'))"
    )
    browser.until(f"{first}.innerText.includes('80 s')")  # 40 steps of two seconds each
    browser.evaluate("document.querySelector('[type=range]').value = 9")
    browser.evaluate("document.querySelector('[type=range]').dispatchEvent(new Event('input', { bubbles: true }))")
    browser.until("location.search.includes('smooth=9')")
    module = f"import({address + 'static/charts.js'!r})"
    assert browser.evaluate(f"{module}.then(charts => charts.valueRange(null, 0, 0))") == [-1, 1]
    low, high = browser.evaluate(f"{module}.then(charts => charts.valueRange(null, 2, 2))")
    assert 1 < low < 2 < high < 3


def test_the_key_of_the_search_works_on_pages_without_a_search_of_their_own(browser: Browser, address: str) -> None:
    for page in ("step?run=first&step=1", "rollout?run=first&rollout=3", "group?run=first&task=0", "store?run=first"):
        browser.open(address + page)
        browser.until(f"{READY} && document.querySelector('nav [type=search]')")
        browser.press("/")
        assert browser.evaluate("document.activeElement.type") == "search", page
    browser.type("reward=1")
    browser.press("Enter")
    browser.until(f"document.querySelector('h1')?.innerText == 'Search' && {READY}")
    assert "q=reward%3D1" in browser.evaluate("location.search")


def test_a_table_is_sorted_and_filtered_by_keys_alone(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.until(f"{READY} && document.querySelectorAll('tbody tr').length == 3")
    browser.evaluate("[...document.querySelectorAll('th button')].find(found => found.innerText == 'step').focus()")
    browser.press("Enter")
    browser.until("document.querySelector('th[aria-sort=ascending]')")
    assert texts(browser, "tbody a") == ["retried", "sweep/0-loss-gspo", "first"]
    browser.press("Enter")
    browser.until("document.querySelector('th[aria-sort=descending]')")
    assert texts(browser, "tbody a") == ["first", "sweep/0-loss-gspo", "retried"]
    browser.press("/")
    browser.type("gspo")
    browser.until("document.querySelectorAll('tbody tr').length == 1")


def test_a_rollout_is_explained_and_read_to_its_tokens(browser: Browser, address: str) -> None:
    page = f"{address}rollout?run=retried&rollout="
    for rollout, fate in (
        (0, "Step 1 trained on this rollout."),
        (7, "Step 1 dropped its group: all rewards are equal."),
    ):
        browser.open(f"{page}{rollout}")
        browser.until(f"{READY} && document.querySelector('.fate')")
        assert texts(browser, ".fate") == [fate]
    browser.open(f"{page}99")
    browser.until(f"{READY} && document.querySelector('.fate')")
    assert texts(browser, ".fate")[0].startswith("It is finished, and waits")
    browser.evaluate("document.querySelector('summary').click()")
    assert HOSTILE in texts(browser, "details dd") and "owned" not in browser.evaluate("document.title")
    assert texts(browser, ".by-model summary") == ["tool call search"]
    assert texts(browser, ".by-model > .said") == ["I look.", "Then"]
    browser.until("document.querySelector('.message img').naturalWidth == 40")
    assert browser.evaluate("document.images.length") == 1, "SVG is shown as text"
    browser.evaluate("[...document.querySelectorAll('summary')].find(x => x.innerText == '1 spans').click()")
    assert texts(browser, "[aria-label=spans] td:is(:first-child, :nth-child(5))") == [HOSTILE, "error"]
    browser.evaluate("document.querySelector('[aria-label=spans] summary').click()")
    assert HOSTILE in json.loads(texts(browser, "[aria-label=spans] .said")[0])["attributes"]
    click(browser, "1: infra_error")
    browser.until("document.querySelector('pre.problem')")
    assert texts(browser, "[aria-label=branches] li li") == ["turn 2", "turn 3"]
    assert texts(browser, "pre.problem") == [HOSTILE] and "attempt=0" in browser.evaluate("location.search")
    click(browser, "2: succeeded")
    click(browser, "Tokens")
    browser.until(f"{READY} && document.querySelector('.tokens [data-place]')")
    assert browser.evaluate("document.querySelectorAll('[data-place]').length") < 6000, "far tokens are made later"
    assert len(texts(browser, ".movers button")) == 1 and texts(browser, ".earned") == ["reward 0.5000"]
    browser.evaluate("document.querySelector('.movers button').click()")
    browser.until("document.querySelector('.token-facts').innerText.includes('token 11000 of the answer')")
    browser.until("document.querySelector('.chosen.heat-50')?.getBoundingClientRect().bottom < innerHeight")
    browser.until("!document.querySelector('[data-place=\"9\"]')")
    assert browser.evaluate("document.querySelectorAll('[data-place]').length") < 6000, "far tokens are removed"
    browser.evaluate("document.querySelector('.tokens').focus()")
    browser.press("ArrowRight")
    browser.until("document.querySelector('.token-facts').innerText.includes('token 11001 of the answer')")
    assert "log-prob -0.0100" in " ".join(texts(browser, ".token-facts span"))
    browser.evaluate("[...document.querySelectorAll('.signals label')].find(x => /version/.test(x.innerText)).click()")
    browser.until("document.querySelector('.chosen.series-2-25') && location.search.includes('signal=version')")
    assert texts(browser, ".legend span:has(i)") == ["version 0", "version 1"]


def test_a_step_shows_rewards_by_bin_and_groups_that_taught_nothing(browser: Browser, address: str) -> None:
    browser.open(f"{address}step?run=retried&step=1")
    browser.until(f"{READY} && document.querySelectorAll('.histogram button').length == 2")
    assert texts(browser, ".struck") == ["01"], "the prompt of recorded tokens"
    assert "2 rollouts and 7 tokens, 25 %" in texts(browser, ".cost")[0]
    kinds = texts(browser, "[aria-label='rollouts by their end'] tbody tr")
    assert [kind.split()[:4] for kind in kinds[:2]] == [
        ["trained", "on", "6", "0.5000"],
        ["dropped", "2", "1", "3.500"],
    ]
    bars = "[...document.querySelectorAll('.bars i')].map(bar => bar.offsetHeight > 0)"
    assert browser.evaluate(bars) == [False, True, True, True], "the dropped group earned 1"
    browser.evaluate("document.querySelectorAll('.histogram button')[0].click()")
    browser.until("document.querySelector('.shown').innerText.startsWith('3 of 8, reward 0')")
    assert "bin=0" in browser.evaluate("location.search")
    assert texts(browser, "section[aria-label=rollouts] tbody td:first-child") == ["0", "2", "4"]


def test_keys_open_the_next_and_the_previous_rollout_and_step(browser: Browser, address: str) -> None:
    browser.open(f"{address}rollout?run=first&rollout=4&view=tokens")
    browser.until(f"{READY} && document.querySelector('h1').innerText.startsWith('Rollout 4')")
    browser.press("j")
    browser.until(f"document.querySelector('h1')?.innerText.startsWith('Rollout 5') && {READY}")
    assert "view=tokens" in browser.evaluate("location.search")
    browser.press("k")
    browser.until(f"document.querySelector('h1')?.innerText.startsWith('Rollout 4') && {READY}")
    browser.open(f"{address}run?run=first")
    browser.until(f"{READY} && document.querySelector('a[href*=worst]')")
    browser.evaluate("document.querySelector('a[href*=worst]').click()")
    browser.until(f"location.search.includes('rollout=') && {READY}")
    assert "reward\n0" in texts(browser, ".facts div") and "pick" not in browser.evaluate("location.search")
    browser.open(f"{address}step?run=first&step=2")
    browser.until(f"{READY} && document.querySelector('h1').innerText == 'Step 2'")
    browser.press("j")
    browser.until(f"document.querySelector('h1')?.innerText == 'Step 3' && {READY}")


def test_the_answers_of_a_group_are_marked_where_they_differ(browser: Browser, address: str) -> None:
    browser.open(f"{address}rollout?run=retried&rollout=0")
    browser.until(f"{READY} && document.querySelector('dd a')")
    browser.evaluate("document.querySelector('dd a').click()")
    browser.until(f"{READY} && document.querySelectorAll('.answer').length == 2")
    assert texts(browser, ".answer h3 a") == ["rollout 1", "rollout 0"], "the best first"
    assert texts(browser, ".answer .context") == ["answer", "answer"] and texts(browser, "mark") == ["1", "0"]
    assert "right" in texts(browser, ".answer dt")[1] and "expected answer\n1" in texts(browser, ".facts div")
    browser.open(f"{address}group?run=retried&task=9")
    browser.until(f"{READY} && document.querySelector('.answer')")
    assert HOSTILE in texts(browser, ".facts dd") and "owned" not in browser.evaluate("document.title")


def test_any_two_rollouts_are_compared_word_by_word(browser: Browser, address: str) -> None:
    browser.open(f"{address}group?run=first&task=0")
    browser.until(f"{READY} && document.querySelector('a[href^=compare]')")
    browser.evaluate("document.querySelector('a[href^=compare]').click()")
    browser.until(f"{READY} && document.querySelector('h1')?.innerText == 'Rollouts 1 and 0'")
    assert texts(browser, ".pair mark") == ["1", "0"] and texts(browser, ".pair .said")[:2] == ["What is 0 + 1?"] * 2
    reward = next(row for row in texts(browser, "tbody tr") if row.startswith("reward"))
    assert reward.split() == ["reward", "1", "0"]
    browser.open(f"{address}rollout?run=first&rollout=3")
    browser.until(f"{READY} && document.querySelector('[name=other]')")
    browser.evaluate("document.querySelector('[name=other]').focus()")
    browser.type("8")
    browser.press("Enter")
    browser.until(f"{READY} && document.querySelector('h1')?.innerText == 'Rollouts 3 and 8'")
    module = f"import({address + 'static/text.js'!r})"
    compared = "found.differences('a b c, e', 'a x c, d e')"
    assert browser.evaluate(f"{module}.then(found => {compared})") == [
        [["a ", False], ["b", True], [" c, e", False]],
        [["a ", False], ["x", True], [" c,", False], [" d", True], [" e", False]],
    ]
    compared = "found.differences('a ' + 'y '.repeat(3000) + 'b', 'a x ' + 'z '.repeat(3000) + 'b')"
    parts = browser.evaluate(f"{module}.then(found => {compared})")
    assert [len(side) for side in parts] == [3, 3], "the middle of long texts is one part"


def test_the_options_of_two_runs_are_compared(browser: Browser, address: str, root: Path) -> None:
    for name, rate in (("one", 0.1), ("two", 0.2)):
        options = f"recipe: train\nsteps: 3\ntrain:\n  learning_rate: {rate}\n"
        write_run(root / name, options=options)
    browser.open(f"{address}?compare=one%0Atwo")
    browser.until(f"{READY} && document.querySelector('[aria-label=\"options that differ\"] tbody')")
    assert texts(browser, "[aria-label='options that differ'] tbody td") == ["train.learning_rate", "0.1", "0.2"]
    for name in ("one", "two"):
        shutil.rmtree(root / name)


def test_equal_answers_are_one_column_and_a_task_drawn_once_one_group(
    browser: Browser, address: str, root: Path
) -> None:
    write_run(root / "equal", steps=1)
    with closing(open_store(root / "equal" / "journal.sqlite")) as store:
        store.append([TaskIssued(50, 999, "sums", {"prompt": "?"}), *(RolloutQueued(90 + n, 50, n) for n in range(3))])
        for sample in range(3):
            store.append(rollout_events(90 + sample, float(sample > 0), turn(3, 0)))
    browser.open(f"{address}task?run=equal&task=50")
    browser.until(f"{READY} && document.querySelector('.answer')")
    assert texts(browser, ".answer h3") == ["2× rollout 91, 92 succeeded", "rollout 90 succeeded"]
    assert "The run drew this task once." in texts(browser, "p.muted") and not texts(browser, "select")


def test_a_search_finds_what_is_typed_and_says_how_far_it_looked(browser: Browser, address: str) -> None:
    browser.open(f"{address}search?run=retried")
    browser.until(f"{READY} && document.querySelectorAll('tbody tr').length == 9")
    browser.press("/")
    browser.type("tool:search -outcome:failed")
    browser.until(f"{READY} && document.querySelectorAll('tbody tr').length == 1")
    assert texts(browser, "tbody a") == ["99", "9"] and "q=tool" in browser.evaluate("location.search")
    assert texts(browser, ".looked") == ["1 found. 9 rollouts were looked at."]
    browser.press("Escape")
    browser.until("document.querySelectorAll('tbody tr').length == 9")
    browser.press("/")
    browser.type("length<3")
    browser.until("document.querySelector('[role=alert]')?.innerText.includes('knows no `length`')")
    browser.problems.clear()


def test_the_answers_to_a_task_at_two_times_are_compared(browser: Browser, address: str) -> None:
    browser.open(f"{address}group?run=retried&task=0")
    browser.until(f"{READY} && document.querySelector('dd a[href^=task]')")
    browser.evaluate("document.querySelector('dd a[href^=task]').click()")
    browser.until(f"{READY} && document.querySelectorAll('.panel canvas').length == 2")
    assert [title for title in texts(browser, "h2") if "Answers" in title] == ["Answers at step 1, task 0"]
    browser.evaluate(
        "(found => { found.value = '9'; found.dispatchEvent(new Event('change', { bubbles: true })); })"
        "(document.querySelectorAll('select')[1])"
    )
    browser.until("document.querySelector('[aria-label^=\"answers at task 9\"] .answer')")
    assert "b=9" in browser.evaluate("location.search") and texts(browser, ".answer h3 a")[-1] == "rollout 99"
    assert "common first tokens" in texts(browser, ".answer:last-child dt") and len(texts(browser, "mark")) == 3


def test_a_replay_leads_to_the_tokens_that_it_moves(browser: Browser, address: str) -> None:
    browser.open(f"{address}step?run=first&step=2")
    browser.until(f"{READY} && document.querySelector('[aria-label=replays]')")
    assert texts(browser, "[aria-label=replays] code")[0].endswith("first --step 2")
    browser.open(f"{address}step?run=first&step=1")
    browser.until(f"{READY} && document.querySelector('[aria-label=replays] a')")
    browser.evaluate("document.querySelector('[aria-label=replays] a').click()")
    browser.until(f"{READY} && document.querySelector('h1').innerText == 'Replay of step 1'")
    assert texts(browser, '[aria-label="options that differ"] tbody td') == [
        *("loss.name", "ppo", "gspo"),
        *("loss.clip_high", "0.2", "0.3"),
    ]
    browser.evaluate("document.querySelector('[aria-label^=\"tokens whose\"] tbody a').click()")
    browser.until(f"{READY} && document.querySelectorAll('.movers button').length == 4")
    assert "side=changed" in browser.evaluate("location.search") and "−" not in texts(browser, ".movers")[0]
    assert texts(browser, ".movers button")[0].endswith(" -6"), "the largest first"
    browser.evaluate("document.querySelector('.movers button').click()")
    browser.until("document.querySelector('.token-facts').innerText.includes('advantage 106')")
    assert "clipped" in texts(browser, ".token-facts span")
    browser.evaluate(
        "[...document.querySelectorAll('.signals label')].find(x => x.innerText.trim() == 'advantage').click()"
    )
    browser.until("document.querySelector('.movers button').innerText.endsWith('106')")
    assert "log-prob of the trainer" in texts(browser, ".signals label") and "KL" in texts(browser, ".signals label")
    browser.open(f"{address}group?run=first&task=0")
    browser.until(f"{READY} && document.querySelector('.answer')")
    assert "advantage with other options" in texts(browser, ".answer dt")


def test_a_hostile_text_is_shown_as_text(browser: Browser, address: str) -> None:
    browser.open(f"{address}run?run=sweep%2F0-loss-gspo")
    browser.until(f"{READY} && document.querySelector('pre.problem')")
    assert texts(browser, "pre.problem") == [HOSTILE] and "owned" not in browser.evaluate("document.title")
    kinds = " ".join(texts(browser, ".legend span"))
    assert "killed" in kinds and "resumed" in kinds and "ended by an error" in kinds
    assert texts(browser, "[aria-label=sessions] tbody td")[6:8] == ["cuda", "torch 2.9, numpy 2.3"]


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_page_has_no_sideways_scroll_and_enough_contrast(
    browser: Browser, address: str, root: Path, dark: bool
) -> None:
    rollout, group = "rollout?run=retried&rollout=99", "group?run=retried&task=0"
    (replay,) = (path.stem for path in (root / "first" / "replays").glob("*.json"))
    for page in (
        "",
        "run?run=first",
        "step?run=first&step=2",
        "store?run=retried",
        group,
        rollout,
        f"{rollout}&view=tokens",
        f"{rollout}&view=tokens&signal=version",
        f"replay?run=first&replay={replay}",
        *(f"rollout?run=first&rollout=3&view=tokens&signal={signal}" for signal in ("weight", "entropy", "mask")),
        "search?run=retried&q=answer",
        "task?run=retried&task=0",
    ):
        browser.open(address + page, width=400, dark=dark)
        browser.until(f"{READY} && document.querySelector('tbody tr, .said, .tokens')")
        assert browser.evaluate("document.documentElement.scrollWidth") <= 400
        assert browser.evaluate(CONTRAST) >= 4.5


def test_a_run_that_goes_on_is_shown_on(browser: Browser, address: str, root: Path) -> None:
    write_metrics(root / "live", 3)
    write_journal(root / "live", 3)
    browser.open(f"{address}run?run=live")
    browser.until(f"{READY} && document.querySelector('.facts')?.innerText.includes('step\\n3')")
    time.sleep(2.0)  # the stream of changes begins
    write_metrics(root / "live", 9, first=4)
    browser.until("document.querySelector('.facts').innerText.includes('step\\n9')", within_s=6)
    browser.until("document.querySelector('.plot[aria-label^=\"reward\"]').getAttribute('aria-label').endsWith(' 1')")


def test_a_page_that_gets_no_stream_asks_every_few_seconds(
    browser: Browser, address: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.view.server.MOST_STREAMS", 0)
    write_metrics(root / "alone", 3)
    browser.open(f"{address}run?run=alone")
    browser.until(f"{READY} && document.querySelector('.facts')?.innerText.includes('step\\n3')")
    time.sleep(2.5)  # the refused stream makes the page ask once more
    write_metrics(root / "alone", 9, first=4)
    browser.until("document.querySelector('.facts').innerText.includes('step\\n9')", within_s=15)
    assert browser.problems and all("503" in problem for problem in browser.problems)
    browser.problems.clear()


def test_an_exported_rollout_is_shown_to_its_tokens_without_a_server(
    browser: Browser, root: Path, tmp_path: Path
) -> None:
    export_page(root / "retried", tmp_path / "page.html", None, 99)
    browser.open("about:blank")  # the page before may still ask
    browser.until("location.href == 'about:blank'")
    browser.requested.clear()
    browser.open((tmp_path / "page.html").as_uri())
    browser.until(f"{READY} && document.querySelector('.fate')")
    browser.evaluate("document.querySelector('summary').click()")
    assert HOSTILE in texts(browser, "details dd") and "owned" not in browser.evaluate("document.title")
    click(browser, "Tokens")
    browser.until("document.querySelector('.tokens [data-place]')")
    assert browser.evaluate("document.querySelectorAll('a').length") == 0, "no link leads to a server"
    assert browser.requested == [(tmp_path / "page.html").as_uri(), data_url(png(40, 30))]
    browser.requested.clear()


def test_the_findings_of_a_run_lead_to_their_steps_rollouts_and_curves(
    browser: Browser, address: str, root: Path
) -> None:
    run = write_run(root / "lost", steps=10)
    (run / "metrics.jsonl").unlink()
    write_collapse(run)
    browser.open(f"{address}run?run=lost")
    browser.until(f"{READY} && document.querySelector('[aria-label=findings] li')")
    assert texts(browser, "[aria-label=findings] strong")[0] == "reward collapsed"
    first = texts(browser, "[aria-label=findings] li")[0]
    assert "in step 4" in first and "train.learning_rate=0.1" in texts(
        browser, "[aria-label=findings] li:first-child code"
    )
    links = browser.evaluate(
        "[...document.querySelectorAll('[aria-label=findings] li:first-child a')].map(a => a.href)"
    )
    assert [link.rpartition("/")[2] for link in links] == [
        "step?run=lost&step=4",
        "step?run=lost&step=10",
        "search?run=lost&q=step%3D4",
        "run?run=lost&metrics=reward%2Ctruncated%2Clearning_rate%2Cgrad_norm",
    ]
    browser.open(str(links[3]))
    browser.until("document.querySelectorAll('.panel canvas').length == 4")
    shutil.rmtree(run)


def test_an_unknown_run_and_an_ended_server_are_said(browser: Browser, address: str) -> None:
    browser.open(f"{address}run?run=nothing")
    browser.until("document.querySelector('[role=alert]')?.innerText.includes(\"There is no run 'nothing' here\")")
    assert browser.problems and all("404" in problem for problem in browser.problems)
    browser.problems.clear()


DRAWN = """[...document.querySelectorAll('.panel canvas')].every((canvas) => {
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  return pixels.data.some((value) => value);
})"""
"""True if every curve has a pixel that is not empty."""
CONTRAST = """(() => {
  const parse = (text) => {
    const numbers = text.match(/[\\d.]+/g).map(Number);
    return text.startsWith("color(srgb") ? numbers.map((v, place) => (place < 3 ? 255 * v : v)) : numbers;
  };
  const light = (rgb) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.slice(0, 3).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  let least = 21;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const style = getComputedStyle(element);
    if (!walker.currentNode.data.trim() || !element.getClientRects().length || element.disabled) continue;
    const [one, other] = [light(parse(style.color)), light(behind(element))].sort((a, b) => b - a);
    least = Math.min(least, (one + 0.05) / (other + 0.05));
  }
  return least;
})()"""
"""The least contrast of a text with its background, by the formula of WCAG."""
