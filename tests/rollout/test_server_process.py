"""The report of a server that ended: its errors, where they are further up in its log, and its last lines."""

from __future__ import annotations

from pathlib import Path

from etude.rollout.server_process import ServerProcess

WORKER = "(VllmWorker-0 pid=25409) ERROR 11-26 03:10:25 [multiproc_executor.py:953] "
CORE = "(EngineCore pid=25080) ERROR 11-26 03:10:27 [core.py:1510] "
FAILED = "Exception: WorkerProc initialization failed due to an exception in a background process."
LOG = [
    "(APIServer pid=22147) WARNING 11-26 03:09:37 [utils.py:255] errors like `OSError: [Errno 24]` can follow",
    f"{WORKER}Traceback (most recent call last):",
    f"{WORKER}ValueError: Available memory on node 0 (14.72/18.46 GiB) is less than desired.",
    f"{CORE}Traceback (most recent call last):",
    f"{CORE}{FAILED}",
    "Process EngineCore:",
    "Traceback (most recent call last):",
    FAILED,
    *(f'  File "core_client.py", line {line}, in __init__' for line in range(20)),
    "RuntimeError: Engine core initialization failed. See root cause above.",
]


def report_of(log: Path, *lines: str) -> str:
    log.write_text("\n".join(lines) + "\n")
    return ServerProcess("vllm-0", log).describe_exit()


def test_the_errors_further_up_are_quoted_before_the_last_lines(tmp_path: Path) -> None:
    errors, _, tail = report_of(tmp_path / "log", *LOG).partition("Its last lines:")
    assert [line.strip() for line in errors.splitlines()[1:]] == [
        "ValueError: Available memory on node 0 (14.72/18.46 GiB) is less than desired.",
        FAILED,
    ]
    assert "RuntimeError: Engine core initialization failed" in tail and len(tail.splitlines()) == 13


def test_an_error_among_the_last_lines_is_not_quoted_twice(tmp_path: Path) -> None:
    report = report_of(tmp_path / "log", *LOG[:3])
    assert "Its errors" not in report and report.count("ValueError") == 1


def test_a_server_that_wrote_nothing(tmp_path: Path) -> None:
    assert ServerProcess("vllm-0", tmp_path / "none").describe_exit().endswith("It wrote nothing.")
