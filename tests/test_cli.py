"""The command line: its output, its errors, and the files it leaves, with a terminal and without."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude import __version__
from etude.algorithms import LOSSES
from etude.cli import build_parser, main
from etude.demo.tabular.command import NEXT
from etude.demo.tabular.run import DemoRun
from etude.errors import ConfigError, describe_out_of_memory, describe_system_error
from etude.recipes.registry import SUPERVISED
from etude.recipes.run.config import Run
from tests.commands import Commands, composed, in_turn, root_of
from tests.processes import gone
from tests.waits import blocked_until

ETUDE = [sys.executable, "-c", "import sys; from etude.cli import main; sys.exit(main())"]
SHORT = ["demo", "algorithms", "steps=2", "groups=2", "group_size=4", "mini_batches=2"]
ONE_STEP = ["steps=1", "mini_batches=1"]
Captured = pytest.CaptureFixture[str]


def refused(capsys: Captured, *arguments: str) -> str:
    """Return the error of a command line."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("etude: ") and "Traceback" not in captured.err
    return captured.err


def demonstrated(tmp_path: Path, capsys: Captured, *arguments: str) -> tuple[dict[str, object], str]:
    """Return the demonstration's JSON report, and all its output."""
    assert main([*SHORT, f"directory={tmp_path}", "--json", *arguments]) == 0
    printed = capsys.readouterr().out
    return json.loads(printed.splitlines()[-1]), printed


# -- what it shows ---------------------------------------------------------------------------------------------------


NAMES = (
    "train",
    "eval",
    "generate",
    "export",
    "plot",
    "answers",
    "replay",
    "version",
    "config",
    "demo",
    "data",
    "plan",
    "simulate",
    "doctor",
    "completion",
    "store",
    "runner",
)
DATA = [["data", "prepare"], ["data", "show"], ["export", "rollouts"]]
DEMOS = [["demo", "language"], ["demo", "agent"], ["demo", "vision"], ["demo", "algorithms"]]
COMMANDS = [*([name] for name in NAMES), ["config", "show"], *DEMOS, *DATA]
SWEPT = {"--multirun", "generate"}  # several runs, or words that are no options


@pytest.mark.parametrize("command", [[], *COMMANDS])
def test_help_is_there_for_every_command(command: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    assert "usage: etude" in capsys.readouterr().out


def test_an_unknown_flag_prints_the_usage_of_its_command(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["view", "--bogus"])
    assert "usage: etude view" in (printed := capsys.readouterr().err) and "arguments: --bogus" in printed


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["train"],
        ["eval"],
        ["generate"],
        ["plan"],
        ["simulate"],
        ["replay"],
        ["config", "show"],
        ["demo"],
        *DEMOS[1:],
        *DATA,
    ],
    ids=" ".join,
)
def test_help_teaches_by_commands_that_work(command: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    shown = capsys.readouterr().out.partition("start here:" if not command else "examples:")[2]
    shown = re.sub(r" \\\n +", " ", shown)  # a command over two lines
    lines = [line.strip() for line in shown.splitlines() if line.startswith("  etude ")]
    lines = [line for line in lines if "…" not in line and "--help" not in line]
    assert len(lines) >= 2
    for line in lines:
        words = shlex.split(line.partition(" > ")[0].partition("   ")[0])[1:]
        if words[0] == "demo" and not {"agent", "vision", "algorithms"} & set(words):
            words.insert(1, "language")  # which `etude demo` alone runs
        arguments = build_parser().parse_args(words)
        if "overrides" in arguments and arguments.config is None and not SWEPT & set(words) and words[0] != "eval":
            assert composed(arguments, words)


@pytest.mark.parametrize("command", ["train", *SUPERVISED])
def test_the_options_that_help_teaches_are_those_of_the_command(command: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    taught = capsys.readouterr().out.partition("written key=value:\n")[2].partition("\n\n")[0].splitlines()
    words = [shlex.split(line)[0] for line in taught if "my_package" not in line]
    assert len(words) == len(taught) - 1 >= 3
    assert composed(build_parser().parse_args([command, *words]), [command, *words])


def test_every_command_knows_the_class_of_its_options() -> None:
    for name, kind in SUPERVISED.items():
        for words in ([name], ["config", "show", name]):
            assert root_of(build_parser().parse_args(words), words) is kind
    for words, root in (["train"], Run), (["config", "show", "--demo"], DemoRun), (["demo", "algorithms"], DemoRun):
        assert root_of(build_parser().parse_args(words), words) is root


def test_help_is_quick() -> None:
    """It does not load the slow libraries, for any form of the request."""
    code = (
        "import sys; from etude.cli import main\n"
        "try: main(['demo', 'algorithms', '--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'hydra', 'matplotlib', 'transformers', 'ray'} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"


def test_the_version_is_printed(capsys: Captured) -> None:
    assert main(["version"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["etude"] == __version__
    assert {"python", "torch", "numpy", "hydra", "pydantic", "wandb", "cpu"} <= lines.keys()


def test_the_version_is_printed_as_json(capsys: Captured) -> None:
    assert main(["version", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["etude"] == __version__ and report["packages"]["torch"] and report["devices"][0]["name"] == "cpu"


def test_the_options_are_shown_with_their_meaning(capsys: Captured) -> None:
    assert main(["config", "show", "loss=gspo", "steps=7"]) == 0
    shown = capsys.readouterr().out
    assert "loss: gspo" in shown and "steps: 7" in shown
    assert "training steps; each collects rollouts" in shown


def test_the_options_of_a_run_and_of_the_demonstration_are_shown_apart(capsys: Captured) -> None:
    assert main(["config", "show"]) == 0
    run = capsys.readouterr().out
    assert main(["config", "show", "--demo", "noise=0.5"]) == 0
    demo = capsys.readouterr().out
    assert "model:" in run and "noise" not in run and "noise: 0.5" in demo and "model:" not in demo
    assert main(["config", "show", "dapo", "collect.tasks=7"]) == 0
    shown = capsys.readouterr().out
    assert "refill: 10" in shown and "tasks: 7" in shown


def test_demo_without_a_name_is_the_language_model(capsys: Captured) -> None:
    for words in (["demo"], ["demo", "language"]):
        message = refused(capsys, *words, "train.learning_rat=0.1")
        assert "train.learning_rat is not an option" in message and "train.learning_rate" in message
    assert "Did you mean learning_rate" in refused(capsys, "demo", "algorithms", "learning_rat=0.1")
    with pytest.raises(SystemExit):
        main(["demo", "nosuch"])
    assert "There are language, agent, vision, algorithms." in capsys.readouterr().err


def test_the_yaml_that_is_shown_can_be_read_again(tmp_path: Path, capsys: Captured) -> None:
    assert main(["config", "show", "loss=dppo", "kl=reverse", "seed=3", "--yaml"]) == 0
    first = capsys.readouterr().out
    (tmp_path / "run.yaml").write_text(first)
    assert main(["config", "show", "--config", str(tmp_path / "run.yaml"), "--yaml"]) == 0
    assert capsys.readouterr().out == first


def test_overrides_stand_before_and_after_flags() -> None:
    arguments = build_parser().parse_args(["demo", "algorithms", "loss=ppo", "--json", "steps=3"])
    assert arguments.overrides == ["loss=ppo", "steps=3"] and arguments.json


def test_an_unknown_flag_is_refused(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as end:
        main(["demo", "algorithms", "--fast"])
    assert end.value.code == 2
    assert "--fast" in capsys.readouterr().err


# -- bad input -------------------------------------------------------------------------------------------------------


def test_an_unknown_key_is_reported_with_the_nearest(capsys: Captured) -> None:
    message = refused(capsys, "demo", "algorithms", "learning_rat=0.1")
    assert "learning_rat is not an option" in message and "learning_rate" in message
    assert message.count("learning_rat is not an option") == 1


def test_a_wrong_type_is_reported_with_the_meaning(capsys: Captured) -> None:
    message = refused(capsys, "config", "show", "steps=many")
    assert "steps expects a whole number" in message and "'many'" in message and "training steps; each" in message


def test_a_value_out_of_range_is_reported(capsys: Captured) -> None:
    assert "collect.group_size must be at least 1" in refused(capsys, "config", "show", "collect.group_size=0")
    assert "Did you mean collect.group_size?" in refused(capsys, "config", "show", "group_size=0")


def test_options_that_exclude_each_other_are_reported(capsys: Captured) -> None:
    message = refused(capsys, "config", "show", "loss=dppo", "correction.weight=truncate")
    assert "`correction.weight=none`" in message


def test_an_unknown_loss_lists_those_there_are(capsys: Captured) -> None:
    message = refused(capsys, "demo", "algorithms", "loss=pppo")
    assert "Did you mean ppo" in message
    assert all(name in message for name in LOSSES)


def test_a_file_that_is_not_yaml_is_reported_with_the_line(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "bad.yaml").write_text("steps: [1, 2\nseed: 3\n")
    message = refused(capsys, "demo", "algorithms", "--config", str(tmp_path / "bad.yaml"))
    assert "is not YAML" in message and "line 2" in message


def test_a_file_that_is_not_there_is_reported(tmp_path: Path, capsys: Captured) -> None:
    assert "cannot be read" in refused(capsys, "config", "show", "--config", str(tmp_path / "none.yaml"))


def test_a_plug_in_that_does_not_import_is_reported(capsys: Captured) -> None:
    message = refused(capsys, "demo", "algorithms", "loss=no_such_package.losses:MyLoss")
    assert "no module no_such_package" in message and "PYTHONPATH" in message


def test_a_plug_in_of_the_wrong_kind_is_reported(capsys: Captured) -> None:
    assert "must be a subclass of" in refused(capsys, "config", "show", "loss=pathlib:Path")


def test_a_sweep_without_its_flag_is_reported(capsys: Captured) -> None:
    assert "--multirun" in refused(capsys, "demo", "algorithms", "loss=ppo,gspo")


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("")
    message = refused(capsys, *SHORT, "loss=ppo", f"directory={tmp_path / 'file' / 'runs'}")
    assert "no directory can be created there" in message


def test_an_error_that_shows_only_in_training_is_reported_like_others(tmp_path: Path, capsys: Captured) -> None:
    message = refused(capsys, *SHORT, "loss=gmpo", "advantage=gae", f"directory={tmp_path}")
    assert "GMPO takes one" in message


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ConfigError, match="steps expects a whole number"):
        main(["config", "show", "--demo", "steps=many", "--debug"])


# -- the demonstration -----------------------------------------------------------------------------------------------


def test_every_loss_is_shown_where_none_is_chosen(tmp_path: Path, capsys: Captured) -> None:
    report, printed = demonstrated(tmp_path, capsys, *ONE_STEP)
    runs = report["runs"]
    assert isinstance(runs, list) and [run["loss"] for run in runs] == list(LOSSES)
    for run in runs:
        assert 0 < run["before"] < run["optimum"] == 1.0 and 0 < run["after"] < 1 and run["seconds"] > 0
        assert (Path(str(report["directory"])) / run["name"] / "metrics.jsonl").read_text().count("\n") == 1
    assert str(report["directory"]) in printed
    assert Path(str(report["figure"])).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("how", ["override", "option", "file"])
def test_a_loss_that_is_chosen_is_shown_alone(how: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine.yaml").write_text("loss: gspo\n")
    arguments = {
        "override": ["loss=gspo"],
        "option": ["loss.clip_high=0.3"],
        "file": ["--config", str(tmp_path / "mine.yaml")],
    }[how]
    report, _ = demonstrated(tmp_path / "runs", capsys, *arguments)
    runs = report["runs"]
    assert isinstance(runs, list) and [run["loss"] for run in runs] == ["ppo" if how == "option" else "gspo"]


def test_a_loss_that_cannot_run_is_shown_with_the_reason(tmp_path: Path, capsys: Captured) -> None:
    report, printed = demonstrated(tmp_path, capsys, *ONE_STEP, "correction.weight=truncate")
    runs = report["runs"]
    assert isinstance(runs, list)
    left_out = {run["name"]: run["refused"] for run in runs if "refused" in run}
    assert "dppo" in left_out and "correction.weight=none" in left_out["dppo"]
    assert "ppo" not in left_out and left_out["dppo"] in printed


def test_a_sweep_runs_once_for_each_combination(tmp_path: Path, capsys: Captured) -> None:
    report, _ = demonstrated(tmp_path, capsys, *ONE_STEP, "--multirun", "loss=ppo,cispo", "seed=0,1")
    runs = report["runs"]
    assert isinstance(runs, list)
    assert [run["name"] for run in runs] == [f"loss={loss} seed={seed}" for loss in ("ppo", "cispo") for seed in (0, 1)]
    assert runs[0]["before"] != runs[1]["before"]


def test_two_runs_never_share_a_folder(tmp_path: Path, capsys: Captured) -> None:
    first, _ = demonstrated(tmp_path, capsys, *ONE_STEP, "loss=ppo")
    second, _ = demonstrated(tmp_path, capsys, *ONE_STEP, "loss=ppo")
    assert first["directory"] != second["directory"]


def test_a_plug_in_trains(tmp_path: Path, capsys: Captured) -> None:
    report, _ = demonstrated(tmp_path, capsys, "loss=etude.algorithms.losses.reinforce:REINFORCE")
    runs = report["runs"]
    assert isinstance(runs, list) and runs[0]["after"] > runs[0]["before"]


def test_the_suggested_next_commands_can_be_parsed() -> None:
    for command, _ in NEXT:
        build_parser().parse_args(command.split()[1:])


def test_without_a_terminal_there_are_plain_lines(tmp_path: Path, capsys: Captured) -> None:
    assert main([*SHORT, "loss=ppo", f"directory={tmp_path}"]) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out and captured.err == ""
    assert any(line.startswith("ppo ") and "→" in line for line in captured.out.splitlines())


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    commands = Commands()
    yield commands
    commands.close()


@pytest.mark.slow
def test_a_file_that_knows_only_ascii_gets_ascii_curves(commands: Commands, tmp_path: Path) -> None:
    code, out, err = commands.run([*SHORT, "loss=ppo", f"directory={tmp_path}"], tmp_path, encoding="ascii")
    assert (code, err) == (0, b"")
    assert b"ppo  _" in out and b"\x1b" not in out


def test_on_a_terminal_there_is_a_live_table(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [*ETUDE, *SHORT, "loss=ppo", f"directory={tmp_path}"],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # the terminal closes with its last writer
            break
        if not chunk:
            break
        shown += chunk
    assert running.wait(timeout=60) == 0
    assert b"\x1b[" in shown and b"gained" in shown and b"curves.png" in shown


@pytest.mark.slow
def test_ctrl_c_ends_quietly(commands: Commands, tmp_path: Path) -> None:
    process = commands.start([*SHORT, "loss=ppo", "steps=1000000", f"directory={tmp_path}"], tmp_path)
    try:
        blocked_until(lambda: list(tmp_path.rglob("metrics.jsonl")), within=90)
        os.kill(process, signal.SIGINT)
        assert gone(process, 30.0)
    finally:
        if not gone(process, 0.0):
            os.kill(process, signal.SIGKILL)
        code = commands.wait()
    assert code == 130 and "Traceback" not in (tmp_path / "err").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("closed", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_closed_streams_are_not_written_to(closed: tuple[str, ...], commands: Commands, tmp_path: Path) -> None:
    command = "version" if len(closed) == 2 else "config show"
    lines = {"--help": 0, command: 0, "config show stepps=3": 2}
    for line, expected in lines.items():
        code, out, err = commands.run(line.split(), tmp_path, closed=closed)
        assert code == expected and b"Traceback" not in err, err
        assert b"etude: " not in out


@pytest.mark.slow
def test_streams_that_were_closed_before_the_start_are_not_written_to(tmp_path: Path) -> None:
    codes, _ = in_turn(tmp_path, "--help", "config show stepps=3", behind=">&- 2>&-")
    assert codes == [0, 2]


REFUSED_LOOP = """
import argparse, asyncio, os, resource, sys
from etude import cli

async def work(): pass

def command(_):
    free = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, free + 2))
    asyncio.run(work())

parser = argparse.ArgumentParser()
parser.add_argument("word")
parser.set_defaults(command=command)
cli.build_parser = lambda: parser
sys.exit(cli.main(["word"]))
"""


def test_a_limit_of_open_files_is_reported_without_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", REFUSED_LOOP], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("etude: The system lets this process open no more files (Too many open files)")
    assert done.stderr.count("\n") == 1 and "`ulimit -n 4096`" in done.stderr


@pytest.mark.slow
def test_a_full_disk_is_reported_in_a_sentence(commands: Commands, tmp_path: Path) -> None:
    words = ["config", "show", "--yaml"]
    commands.start(words, tmp_path, out="/dev/full")
    assert commands.wait() == 1
    assert (tmp_path / "err").read_bytes() == b"etude: The system refused to read or write: No space left on device.\n"
    commands.start(words, tmp_path, out="/dev/full", err="/dev/full")
    assert commands.wait() == 1


@pytest.mark.slow
def test_a_terminal_that_knows_only_ascii_is_no_error(tmp_path: Path) -> None:
    locale = "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"
    codes, done = in_turn(tmp_path, "--help", "train --help", "config show", before=locale)
    assert codes == [0, 0, 0] and done.stderr == b""
    assert done.stdout.isascii() and len(done.stdout) > 1500


@pytest.mark.slow
def test_output_that_knows_only_ascii_is_no_error(commands: Commands, tmp_path: Path) -> None:
    """Its encoding refuses what it cannot write."""
    for line in ("--help", "train --help", "config show"):
        code, out, err = commands.run(line.split(), tmp_path, encoding="ascii")
        assert (code, err) == (0, b"") and out.isascii() and len(out) > 500


def test_the_package_is_the_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "etude", "--version"], capture_output=True, text=True)
    assert done.stdout == f"etude {__version__}\n" and done.returncode == 0


def test_a_reader_that_closes_the_pipe_is_no_error() -> None:
    running = subprocess.Popen(
        [*ETUDE, "config", "show", "--yaml"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    assert running.wait(timeout=60) == 141
    assert running.stderr.read() == ""
    running.stderr.close()


@pytest.mark.parametrize("word", ["--steps", "--steps=3", "--learning-rate=3"])
def test_an_option_with_dashes_is_answered_with_its_spelling(word: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", word, "3"])
    assert end.value.code == 2
    message = capsys.readouterr().err
    wanted = {"--steps": "steps=…", "--steps=3": "steps=3", "--learning-rate=3": "learning_rate=3"}[word]
    assert f"{word} is unknown here" in message and f"without dashes: {wanted}" in message
    assert ("here it is train.learning_rate" in message) == (wanted == "learning_rate=3")


@pytest.mark.parametrize(
    ("words", "flags", "address"),
    [
        (["serve", "runs/mine", "--port", "8080"], "--port", "127.0.0.1:8080"),
        (["view", "--port=8080"], "--port", "127.0.0.1:8080"),
        (["store", "stores/mine", "--host", "0.0.0.0", "--port", "99"], "--host and --port", "0.0.0.0:99"),
    ],
)
def test_a_port_is_answered_by_the_address_to_listen_on(
    words: list[str], flags: str, address: str, capsys: Captured
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert f"an address is given by --listen, not by {flags}: --listen {address}" in capsys.readouterr().err


def test_the_demonstration_refuses_another_model_or_other_data(capsys: Captured) -> None:
    for option in ("model.path=mine", "data.train=[x]", "reward=gsm8k"):
        assert "The demonstration brings its own" in refused(capsys, "demo", option)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_memory_that_the_system_refuses_is_reported_as_such(error: MemoryError | OSError) -> None:
    message = describe_system_error(error)
    assert message.startswith("The system gave this process no more memory") and "`ulimit -v unlimited`" in message
    on_a_gpu = describe_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore follows."))
    assert on_a_gpu.startswith("The GPU has no more memory (CUDA out of memory. Tried to allocate 2.00 GiB.). `etude")
    assert describe_out_of_memory(RuntimeError("shapes do not fit")) == ""
    assert describe_system_error(OSError(errno.EIO, "Input/output error", "x")) == (
        "The system refused to read or write at x: Input/output error."
    )
