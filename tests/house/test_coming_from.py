"""The pages for people who come from verl and TRL name options that exist, and say what the error messages say."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from etude.config.compose import compose
from etude.errors import ConfigError, UnknownChoiceError, UnknownKeyError
from etude.recipes.names import KNOWN_AS
from etude.recipes.run import Run
from tests.house.documents import INLINE, ROOT
from tests.sweeps import sweep

PAGES = ("coming-from-verl.md", "coming-from-trl.md")
OPTION = re.compile(r"[a-z_]+(\.[a-z_]+)*(=\S+)?")


def rows() -> Iterator[tuple[str, str, list[str]]]:
    """Each line of the tables: the page, the other trainer's name, and what stands in code on the right."""
    for page in PAGES:
        for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
            if line.startswith("| `"):
                theirs, ours = line.strip("| ").split(" | ", 1)
                yield page, theirs.strip("`"), INLINE.findall(ours)


ROWS = list(rows())


def options(code: str) -> list[str]:
    """The options of one piece of code; none where it is a command or a word of theirs."""
    words = code.split()
    fits = all(OPTION.fullmatch(word) for word in words) and not code.startswith("etude ")
    return words if fits and (len(words) > 1 or "=" in code or "." in code or code in Run.model_fields) else []


@sweep(("page", "theirs", "codes"), ROWS)
def test_what_is_named_exists(page: str, theirs: str, codes: list[str]) -> None:
    found = [options(code) for code in codes]
    assert any(found), "no option of ours is named"
    for words in found:
        told = [word for word in words if "=" in word]
        for word in words:
            if "=" not in word:
                with pytest.raises(ConfigError) as caught:
                    compose(Run, [*told, f"{word}=[[]]"])
                assert not isinstance(caught.value, UnknownKeyError), word
        try:
            compose(Run, told)
        except (UnknownKeyError, UnknownChoiceError):
            raise
        except ConfigError as error:
            pytest.fail(f"{told}: {error}")
    known = KNOWN_AS.get(theirs.rpartition(".")[2])
    if known is not None and not re.match(r"critic\.|.*val_kwargs", theirs):  # named alike, and another's
        named = {word.partition("=")[0] for words in found for word in words}
        assert any(name == known or name.startswith(f"{known}.") for name in named), f"errors say {known}"


def test_the_pages_have_tables_of_all_that_is_configured() -> None:
    sections = {theirs.partition(".")[0] for page, theirs, _ in ROWS if "verl" in page}
    assert sections >= {"data", "actor_rollout_ref", "critic", "reward_model", "custom_reward_function", "trainer"}
    assert len(ROWS) > 100
