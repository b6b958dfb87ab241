"""Models and data sets by their names on the Hugging Face hub: from its cache, or downloaded if that is allowed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from etude.cli import main
from etude.config.compose import compose
from etude.errors import ConfigError, RunError
from etude.recipes.hub import check_push, push, resolve_hub_names
from etude.recipes.run.config import Run
from etude.recipes.run.directory import read_run
from etude.recipes.supervised.runs import SFTRun
from tests.hub import COMMIT, TOKEN, Hub, hub
from tests.worlds import make_model, make_tasks

CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files: socratic/*.jsonl
---
# Sums
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of the hub: a tiny model, and data sets."""
    root = tmp_path_factory.mktemp("published")
    model = make_model(root / "tiny")
    (model / "original").mkdir()
    (model / "original" / "params.json").write_text("{}")
    data = root / "sums"
    for name in ("main/train-00000-of-00002", "main/train-00001-of-00002", "main/test-00000-of-00001", "socratic/all"):
        make_tasks(data / f"{name}.jsonl", 4)
    (data / "README.md").write_text(CARD)
    make_tasks(root / "bare" / "data" / "train.jsonl", 3)
    make_tasks(root / "bare" / "data" / "validation.jsonl", 3)
    return root


@pytest.fixture
def served(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process uses, an empty cache, and a working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ETUDE_DOWNLOAD", raising=False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with hub() as state:
        files = state.url + "/{repo_id}/resolve/{revision}/{filename}"
        # Otherwise the first cache would be kept.
        monkeypatch.setattr("etude.recipes.hub.hf_constants", huggingface_hub.constants)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", state.url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(huggingface_hub.file_download, "HUGGINGFACE_CO_URL_TEMPLATE", files, raising=False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        state.repositories |= {
            "models/owner/tiny": published / "tiny",
            "datasets/owner/sums": published / "sums",
            "datasets/owner/bare": published / "bare",
        }
        yield state


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch, served: Hub) -> Hub:
    monkeypatch.setenv("ETUDE_DOWNLOAD", "1")
    return served


def run_of(*options: str) -> Run:
    return resolve_hub_names(compose(Run, options))


def cached(kind: str, name: str) -> Path:
    return Path("cache").absolute() / f"{kind}--{name.replace('/', '--')}" / "snapshots" / COMMIT


def prepared(source: Path, kind: str, name: str) -> Path:
    """Write a snapshot into the cache as another library leaves it there."""
    place = cached(kind, name)
    shutil.copytree(source, place)
    refs = place.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    return place


def refused(*options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run_of(*options)
    return str(caught.value)


# -- models -----------------------------------------------------------------------------------------------------------


def test_the_hub_is_not_called_unless_downloads_are_allowed(served: Hub) -> None:
    message = refused("model.path=owner/tiny")
    assert "`hf download owner/tiny`" in message
    assert "ETUDE_DOWNLOAD=1" in message
    assert served.asked == []


def test_a_model_is_downloaded_once_and_then_read_without_the_network(
    allowed: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("model.path=owner/tiny")
    assert run.model.path == cached("models", "owner/tiny")
    assert (cached("models", "owner/tiny") / "model.safetensors").is_file()
    assert not (cached("models", "owner/tiny") / "original").exists()
    requests_before = len(allowed.asked)
    monkeypatch.setenv("ETUDE_DOWNLOAD", "0")
    assert run_of("model.path=owner/tiny") == run
    monkeypatch.setenv("ETUDE_DOWNLOAD", "1")
    assert run_of("model.path=owner/tiny") == run
    assert len(allowed.asked) == requests_before


def test_a_prepared_cache_is_used_without_the_network(served: Hub, published: Path) -> None:
    place = prepared(published / "tiny", "models", "owner/tiny")
    assert run_of("model.path=owner/tiny").model.path == place
    assert served.asked == []


def test_a_directory_of_that_name_is_taken_first(allowed: Hub, published: Path) -> None:
    shutil.copytree(published / "tiny", "owner/tiny")
    assert run_of("model.path=owner/tiny").model.path == Path("owner/tiny")
    assert allowed.asked == []


def test_a_path_in_a_directory_that_is_here_stays_a_path(served: Hub) -> None:
    Path("runs").mkdir()
    assert "hf download" not in refused("model.path=runs/mine")
    assert served.asked == []


def test_a_name_of_one_word_is_a_model_if_it_is_cached_or_may_be_downloaded(
    served: Hub, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused("model.path=tiny").startswith("`model.path=tiny` is no directory (seen from")
    served.repositories["models/tiny"] = published / "tiny"
    monkeypatch.setenv("ETUDE_DOWNLOAD", "1")
    assert run_of("model.path=tiny").model.path == cached("models", "tiny")
    assert (
        "is no directory (seen from" in (message := refused("model.path=tyni")) and "no model of that name" in message
    )
    monkeypatch.setenv("ETUDE_DOWNLOAD", "0")
    requests_before = len(served.asked)
    assert run_of("model.path=tiny").model.path == cached("models", "tiny")
    assert main(["generate", "tiny", "1+1=", "sampling.max_tokens=2", "device=cpu"]) == 0
    shutil.copytree(published / "tiny", tmp_path / "tiny")
    assert run_of("model.path=tiny").model.path == Path("tiny")
    assert len(served.asked) == requests_before


def test_an_index_that_cannot_be_read_is_reported(served: Hub, published: Path) -> None:
    place = prepared(published / "tiny", "models", "owner/tiny")
    for text in ("{", "[]", "{}", '{"weight_map": 3}'):
        (place / "model.safetensors.index.json").write_text(text)
        assert "without model.safetensors.index.json that can be read" in refused("model.path=owner/tiny")


def test_every_model_that_a_run_names_is_located(served: Hub, published: Path) -> None:
    place = prepared(published / "tiny", "models", "owner/tiny")
    names = ("model.path", "model.tokenizer", "reference.path", "teacher.path", "critic.path")
    run = run_of(*(f"{name}=owner/tiny" for name in names))
    assert {run.model.path, run.model.tokenizer, run.reference.path, run.teacher.path, run.critic.path} == {place}
    judged = run_of("model.path=owner/tiny", "reward=reward_model", "reward.path=owner/tiny")
    assert judged.reward.path == place  # type: ignore[attr-defined]


def test_a_part_of_a_model_in_the_cache_is_not_taken_for_it(served: Hub, published: Path) -> None:
    place = prepared(published / "tiny", "models", "owner/tiny")
    (place / "model.safetensors").unlink()
    assert "without model.safetensors" in refused("model.path=owner/tiny")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert "without model-00002-of-00002.safetensors" in refused("model.path=owner/tiny")


def test_a_model_of_which_a_download_was_broken_off_is_completed(allowed: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of("model.path=owner/tiny")
    (cached("models", "owner/tiny") / "tokenizer.json").unlink()
    monkeypatch.setenv("ETUDE_DOWNLOAD", "0")
    assert "without some of its files" in refused("model.path=owner/tiny")
    monkeypatch.setenv("ETUDE_DOWNLOAD", "1")
    run_of("model.path=owner/tiny")
    assert (cached("models", "owner/tiny") / "tokenizer.json").is_file()


def test_a_refusal_of_the_hub_is_a_sentence(allowed: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has no model of that name" in refused("model.path=owner/other")
    allowed.gated.add("models/owner/tiny")
    assert "authors require an agreement" in refused("model.path=owner/tiny")
    allowed.gated.clear()
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"")
    allowed.repositories["models/owner/pickled"] = pickled
    assert "has no model.safetensors: Etude reads weights from .safetensors" in refused("model.path=owner/pickled")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "could not be reached" in refused("model.path=owner/tiny")
    monkeypatch.setenv("ETUDE_DOWNLOAD", "yes")
    assert "ETUDE_DOWNLOAD is 'yes'" in refused("model.path=owner/tiny")


# -- data sets --------------------------------------------------------------------------------------------------------


def names_of(files: tuple[str, ...]) -> list[str]:
    return [f"{Path(file).parent.name}/{Path(file).name}" for file in files]


def test_a_split_is_the_files_that_the_card_lists(allowed: Hub) -> None:
    run = run_of("data.train=[owner/sums/main:train]", "data.val=[owner/sums/main:test]")
    assert names_of(run.data.train) == ["main/train-00000-of-00002.jsonl", "main/train-00001-of-00002.jsonl"]
    assert names_of(run.data.val) == ["main/test-00000-of-00001.jsonl"]
    assert names_of(run_of("data.train=[owner/sums/socratic]").data.train) == ["socratic/all.jsonl"]
    supervised = resolve_hub_names(compose(SFTRun, ["data.train=[owner/sums/main]"]))
    assert supervised.data.train == run.data.train


def test_only_the_split_that_is_wanted_is_downloaded(allowed: Hub) -> None:
    run_of("data.train=[owner/sums/main:test]")
    assert not list(cached("datasets", "owner/sums").glob("main/train-*"))


def test_files_without_a_card_are_distinguished_by_their_names(allowed: Hub) -> None:
    assert names_of(run_of("data.train=[owner/bare]").data.train) == ["data/train.jsonl"]
    assert names_of(run_of("data.val=[owner/bare:validation]").data.val) == ["data/validation.jsonl"]


def card(text: str, place: Path) -> Path:
    place.write_text(f"---\nconfigs:\n- config_name: main\n  {text}\n---\n", encoding="utf-8")
    return place


def written(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text('{"prompt": "a", "answer": "b"}\n')
    return root


def test_files_that_describe_the_data_are_left_out(allowed: Hub, tmp_path: Path) -> None:
    beside = ("dataset_infos.json", "data/state.json", "data/dataset_dict.json", "config.json", ".cache/x.json")
    root = written(tmp_path / "described", "data/train.jsonl", *beside)
    allowed.repositories["datasets/owner/described"] = root
    assert names_of(run_of("data.train=[owner/described]").data.train) == ["data/train.jsonl"]
    snapshot = cached("datasets", "owner/described")
    assert sorted(file.name for file in snapshot.rglob("*") if file.is_file()) == ["train.jsonl"]
    card("data_files: config.json", root / "README.md")
    allowed.repositories["datasets/owner/listed"] = root
    assert names_of(run_of("data.train=[owner/listed]").data.train)[0].endswith("/config.json"), "a card may list it"


def test_a_files_own_name_says_its_split_before_its_directory_does(allowed: Hub, tmp_path: Path) -> None:
    names = ("test-set/train-0.jsonl", "test-set/valid/part.jsonl", "test-set/part.jsonl")
    allowed.repositories["datasets/owner/nested"] = written(tmp_path / "nested", *names)
    result = {
        split: run_of(f"data.train=[owner/nested:{split}]").data.train for split in ("train", "validation", "test")
    }
    assert [Path(files[0]).name for files in result.values()] == ["train-0.jsonl", "part.jsonl", "part.jsonl"]
    assert {len(files) for files in result.values()} == {1}


def test_a_card_may_name_a_directory_alone(allowed: Hub, tmp_path: Path) -> None:
    root = written(tmp_path / "below", "data/main/train.jsonl", "data/main/test.jsonl", "data/other/train.jsonl")
    card("data_dir: data/main", root / "README.md")
    allowed.repositories["datasets/owner/below"] = root
    for name in ("owner/below", "owner/below/main:train"):
        assert names_of(run_of(f"data.train=[{name}]").data.train) == ["main/train.jsonl"]
    assert not (cached("datasets", "owner/below") / "data" / "other").exists()


@pytest.mark.parametrize(
    "text",
    [
        *("data_files: [{split: train}]", "data_files: 3", "data_files: [3]", "data_files: {train: [[a]]}"),
        *("data_files: [{split: [a], path: b}]", "data_dir: [a]"),
    ],
)
def test_a_card_that_cannot_be_read_is_named(text: str, allowed: Hub, tmp_path: Path) -> None:
    allowed.repositories["datasets/owner/odd"] = root = written(tmp_path / "odd", "train.jsonl")
    card(text, root / "README.md")
    message = refused("data.train=[owner/odd]")
    assert (
        message.startswith("`data.train=[owner/odd]`: the data set's card, ") and "README.md, says where its" in message
    )


def test_a_card_that_names_no_split_means_train(allowed: Hub, tmp_path: Path) -> None:
    allowed.repositories["datasets/owner/one"] = root = written(tmp_path / "one", "x.jsonl")
    card("data_files: [{path: x.jsonl}]", root / "README.md").write_bytes((root / "README.md").read_bytes() + b"\xe9")
    assert names_of(run_of("data.train=[owner/one]").data.train)[0].endswith("/x.jsonl")


def test_the_tasks_of_a_data_set_are_shown_by_its_name(
    served: Hub, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(published / "sums", "datasets", "owner/sums")
    prepared(published / "tiny", "models", "owner/tiny")
    assert main(["data", "show", "owner/sums/main:train", "-n", "1", "--model", "owner/tiny"]) == 0
    assert "8 rows; the longest prompt" in capsys.readouterr().out
    assert main(["data", "show", "owner/others"]) == 2
    message = capsys.readouterr().err
    assert "`owner/others` is no file" in message and "`hf download owner/others --repo-type dataset`" in message
    assert served.asked == []


def test_an_ambiguous_name_is_refused_with_the_possible_ones(allowed: Hub) -> None:
    assert "`owner/sums/main`, `owner/sums/socratic`" in refused("data.train=[owner/sums:train]")
    assert "has no `valid`" in refused("data.train=[owner/sums/main:valid]")
    assert "`owner/sums/main:train`, `owner/sums/main:test`" in refused("data.val=[owner/sums/main]")
    assert "has no data set of that name" in refused("data.train=[owner/others]")


def test_a_data_set_in_the_cache_needs_no_network_and_a_part_of_one_is_refused(served: Hub, published: Path) -> None:
    place = prepared(published / "sums", "datasets", "owner/sums")
    assert len(run_of("data.train=[owner/sums/main:train]").data.train) == 2
    (place / "main" / "train-00001-of-00002.jsonl").unlink()
    message = refused("data.train=[owner/sums/main:train]")
    assert "without main/train-00001-of-00002.jsonl" in message
    assert "`hf download owner/sums --repo-type dataset`" in message
    assert served.asked == []


def test_paths_and_python_functions_are_not_looked_up(served: Hub) -> None:
    names = ("data/train.jsonl", "my_tasks:rows", "my/tasks.py:rows", "./owner/sums")
    assert run_of(f"data.train=[{','.join(names)}]").data.train == names


# -- whole commands ---------------------------------------------------------------------------------------------------


def test_a_model_generates_by_its_name(served: Hub, published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared(published / "tiny", "models", "owner/tiny")
    words = ["generate", "owner/tiny", "1+1=", "sampling.max_tokens=2", "device=cpu"]
    assert main(words) == 0
    assert main(["generate", "owner/other", "1+1="]) == 2
    assert "`hf download owner/other`" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.slow
def test_a_run_is_trained_from_names_and_resumes_with_the_same_snapshot(served: Hub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "etude", "train", "grpo", "model.path=owner/tiny"]
    command += ["data.train=[owner/sums/main:train]", "reward=exact_match", "steps=1", "collect.tasks=1", "device=cpu"]
    command += ["collect.group_size=2", "sampling.max_tokens=2", "train.precision=fp32", "directory=run"]
    command += ["data.max_prompt_length=16", "threads=1"]
    seen = os.environ | {"HF_ENDPOINT": served.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "ETUDE_DOWNLOAD": "1"}
    done = subprocess.run(command, env=seen, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    options = read_run(tmp_path / "run")
    assert options.model.path == cached("models", "owner/tiny")
    assert len(options.data.train) == 2
    assert "Downloading the model owner/tiny" in done.stderr
    requests_before = len(served.asked)
    again = subprocess.run(
        [*command, "steps=2"], env=seen | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=300
    )
    assert again.returncode == 0, again.stderr
    assert len(served.asked) == requests_before


# -- uploads ----------------------------------------------------------------------------------------------------------


def test_a_directory_is_uploaded_as_a_model(served: Hub, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert push(published / "tiny", "owner/new", private=True) == f"{served.url}/owner/new"
    assert served.uploaded["owner/new/config.json"] == (published / "tiny" / "config.json").read_bytes()
    assert "owner/new/model.safetensors" in served.uploaded
    assert served.created[0]["name"] == "new"
    assert {"private": True}.items() <= served.created[0].items() or served.created[0].get("visibility") == "private"


def test_an_impossible_upload_is_refused_before_anything_is_written(
    served: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "run", "out", "--push", "owner/new"]) == 2
    assert "`hf auth login`" in capsys.readouterr().err
    assert main(["export", "run", "out", "--push", "new"]) == 2
    assert "`--push you/name`" in capsys.readouterr().err
    assert main(["export", "run", "out", "--private"]) == 2
    assert "Add `--push" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert served.asked == []


def test_an_upload_that_the_hub_refuses_says_where_the_model_is(
    served: Hub, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    check_push("owner/new")
    with pytest.raises(RunError, match=r"written to .*tiny, and could not be uploaded to owner/new.*`hf upload"):
        push(published / "tiny", "owner/new", private=False)
