"""An unknown name is answered with the nearest known one."""

from __future__ import annotations

import pytest

from etude.cli import main
from etude.config.suggestions import find_closest, suggest_name


def test_the_nearest_name_is_found_whatever_its_case() -> None:
    names = ["grpo", "dapo", "SFT"]
    assert [find_closest(name, names) for name in ("GRPO", "gpro", "sft", "nothing")] == ["grpo", "grpo", "SFT", None]
    assert (suggest_name("Dapo", names), suggest_name("x", names)) == (" Did you mean dapo?", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "there is no command 'trian'. Did you mean train?"),
        (["data", "prepair"], "there is no command 'prepair'. Did you mean prepare?"),
        (["completion", "Bash"], "there is no shell 'Bash'. Did you mean bash?"),
    ],
)
def test_a_mistyped_command_is_reported_with_the_nearest(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(("name", "near"), [("GRPO", "grpo"), ("gpro", "grpo"), ("Dr-GRPO", "dr_grpo")])
def test_a_mistyped_preset_is_reported_with_the_nearest(
    name: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", name]) == 2
    assert f"There is no preset '{name}'. Did you mean {near}?" in capsys.readouterr().err


def test_an_option_without_its_equals_sign_is_no_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "grpo", "model.path", "my-model"]) == 2
    assert (
        "`model.path my-model` are two words, and an option is one: `model.path=my-model`." in capsys.readouterr().err
    )


def test_the_command_without_arguments_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0 and "start here:" in capsys.readouterr().out
