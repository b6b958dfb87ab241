"""The pages for users of verl and TRL name options that exist, and agree with the error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from etude.algorithms.advantages.statistics import EPSILON
from etude.config.compose import compose
from etude.errors import ConfigError, UnknownChoiceError, UnknownKeyError
from etude.recipes.option_names.verl_trl import TRL, VERL
from etude.recipes.run.config import Run
from tests.house.documents import INLINE, ROOT
from tests.option_lists import list_options
from tests.sweeps import sweep

PAGES = ("coming-from-verl.md", "coming-from-trl.md")
OPTION = re.compile(r"[a-z_]+(\.[a-z_]+)*(=\S+)?")


def text_of(page: str) -> str:
    """Return the text of a page of the documentation."""
    return (ROOT / "docs/start" / page).read_text(encoding="utf-8")


def rows() -> Iterator[tuple[str, str, list[str]]]:
    """Return each line of the tables: the page, the other trainer's name, and the code on the right."""
    for page in PAGES:
        for line in text_of(page).splitlines():
            if line.startswith("| `"):
                theirs, ours = line.strip("| ").split(" | ", 1)
                yield page, theirs.strip("`"), INLINE.findall(ours)


ROWS = list(rows())


def options(code: str) -> list[str]:
    """Return the options in one piece of code; none if it is a command or a name of the other trainer."""
    words = code.split()
    fits = all(OPTION.fullmatch(word) for word in words) and not code.startswith("etude ")
    return words if fits and (len(words) > 1 or "=" in code or "." in code or code in Run.model_fields) else []


@cache
def exists(given: tuple[str, ...]) -> None:
    """Compose a run of these options, once for all rows that name them."""
    try:
        compose(Run, given)
    except (UnknownKeyError, UnknownChoiceError):
        raise
    except ConfigError as error:
        pytest.fail(f"{given}: {error}")


def are_options(*names: str, beside: tuple[str, ...] = ()) -> bool:
    """Return whether all these options exist: each gets a value that no option takes, and the error lists every one."""
    with pytest.raises(ConfigError) as caught:
        compose(Run, [*beside, *(f"{name}=[[]]" for name in names)])
    return "is not an option" not in str(caught.value)


@sweep(("page", "theirs", "codes"), ROWS)
def test_named_options_exist(page: str, theirs: str, codes: list[str]) -> None:
    named = [options(code) for code in codes]
    assert any(named), "no option of ours is named"
    for words in named:
        exists(tuple(word for word in words if "=" in word))


def test_options_named_without_a_value_exist() -> None:
    """All options are tried together, except choices: a wrong choice hides every other error."""
    beside: dict[tuple[str, ...], set[str]] = {}
    for words in (options(code) for _, _, codes in ROWS for code in codes):
        given = tuple(word for word in words if "=" in word)
        beside.setdefault(given, set()).update(word for word in words if "=" not in word)
    choices = {leaf.path for leaf in list_options(Run) if leaf.type.startswith("one of ")}
    for given, names in beside.items():
        together, alone = sorted(names - choices), sorted(names & choices)
        for tried in filter(None, [together, *([each] for each in alone)]):
            assert are_options(*tried, beside=given), tried
    assert not are_options(*sorted(beside[()] - choices), "data.no_such")


@pytest.mark.parametrize(("page", "table"), [("coming-from-verl.md", VERL), ("coming-from-trl.md", TRL)])
def test_a_page_shows_the_table_used_by_error_messages(page: str, table: Mapping[str, str]) -> None:
    shown = [line.strip("| ").split(" | ", 1) for line in text_of(page).splitlines() if line.startswith("| `")]
    assert {theirs.strip("`"): ours for theirs, ours in shown} == {
        theirs: ours if "`" in ours else f"`{ours}`" for theirs, ours in table.items()
    }


def test_trl_differs_as_its_page_says() -> None:
    trl = find_spec("trl")
    assert trl is not None and trl.submodule_search_locations
    source = (Path(trl.submodule_search_locations[0]) / "trainer/grpo_trainer.py").read_text(encoding="utf-8")
    assert "std_rewards + 1e-4" in source and EPSILON == 1e-6
    assert "(entropies * effective_mask).sum() / effective_mask.sum()" in source
    page = " ".join(text_of("coming-from-trl.md").split())
    assert "is 10⁻⁶**, and TRL's is 10⁻⁴" in page and "a mean over the tokens of a micro-batch" in page


@pytest.mark.parametrize("table", [VERL, TRL], ids=["verl", "trl"])
def test_common_names_of_other_trainers_are_answered_with_etudes(table: Mapping[str, str]) -> None:
    same = {theirs for theirs, ours in table.items() if theirs in Run.model_fields or theirs == ours}
    assert all(table[theirs] == theirs for theirs in same), "what is called the same here does the same"
    with pytest.raises(UnknownKeyError) as caught:
        compose(Run, [f"{theirs}=1" for theirs in table if theirs not in same])
    for theirs, ours in table.items():
        sentence = f"{theirs} is not an option; here it is {ours.removesuffix(', …')}."
        assert (sentence in str(caught.value)) != (theirs in same), theirs


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *(
            ("rollout.n", "collect.group_size"),
            ("actor.ppo_epochs", "ppo_epochs"),
            ("trainer.save_freq", "checkpoint.every"),
        ),
        *(("train_batch_size", "collect.tasks"), ("timeout_seconds", "agent.timeout"), ("n_runners", "agent.runners")),
        *(("unresponsive_seconds", "agent.heartbeat_timeout"), ("max_attempts", "collect.retries")),
    ],
)
def test_the_last_part_of_a_name_and_names_of_agent_lightning_are_answered_too(theirs: str, ours: str) -> None:
    with pytest.raises(UnknownKeyError, match=f"{re.escape(theirs)} is not an option; here it is {re.escape(ours)}"):
        compose(Run, [f"{theirs}=1"])


def test_an_unknown_name_within_an_option_of_etude_gets_the_usual_error() -> None:
    with pytest.raises(UnknownKeyError) as caught:
        compose(Run, ["data.n=1"])
    assert "here it is" not in str(caught.value)


def test_the_pages_have_tables_of_all_that_is_configured() -> None:
    sections = {theirs.partition(".")[0] for page, theirs, _ in ROWS if "verl" in page}
    assert sections >= {"data", "actor_rollout_ref", "critic", "reward_model", "custom_reward_function", "trainer"}
    assert len(ROWS) > 100
