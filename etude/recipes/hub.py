"""Models and datasets of the Hugging Face hub: from the name in a run's options to the files on this machine.

    model.path=Qwen/Qwen3-0.6B   model.path=gpt2   data.train=[openai/gsm8k/main:train]

A file or directory of that name here comes first. Then the hub's cache is read, without the network. Files that are not
in it are downloaded only if ETUDE_DOWNLOAD=1 allows that; else the error gives the command that downloads them. The run
continues with the directory of the snapshot, so that a resumed run trains on the same revision.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from etude.config.env import may_download
from etude.config.secrets import mask_text
from etude.config.tree import replace_option
from etude.data.files import split_source, with_source
from etude.errors import ConfigError, RunError
from etude.lazy import LazyModule
from etude.observe import configure_logging, get_logger
from etude.recipes.hub_datasets import DatasetName, lacking_shards, parse_dataset_name, patterns_of
from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run
from etude.recipes.run.directory import check_model
from etude.rewards import RewardFunction, RewardModelScore

if TYPE_CHECKING:
    import httpx2
    import huggingface_hub as hf
    import huggingface_hub.constants as hf_constants
    import huggingface_hub.errors as hf_errors

    from etude.data.table import DatasetLike
else:
    hf, hf_errors, httpx2 = map(LazyModule, ("huggingface_hub", "huggingface_hub.errors", "httpx2"))
    hf_constants = LazyModule("huggingface_hub.constants")

R = TypeVar("R", bound=Recipe)
Kind = Literal["model", "dataset"]

NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
ONE_WORD = re.compile(r"\w[\w.-]*")
"""The names of the hub's oldest models."""
DESCRIBES = ("*.json", "*.jinja", "*.txt", "*.model")
"""The files that hold a model's configuration, its tokenizer and its chat template."""
WEIGHTS = "*.safetensors"
CARD = ("README.md", ".gitattributes")
"""The file that describes a dataset, and one that every dataset has."""
OTHER_LAYOUTS = ("*/*", "consolidated*")
"""The same weights once more, for other libraries."""


def resolve_hub_names(run: R, *, weights: bool = True) -> R:
    """Return the same run with local paths in place of the names of models and datasets on the hub.

    weights: the models' weights are needed too. Refuses a `model.path` that is no model directory, before the libraries
    load that would read it.
    """
    if may_download():  # a download is logged as it begins
        configure_logging(run.observe.level, mask=mask_text)
    for role, option in run.path_options.items():
        path = run.path_at(option)
        if path is not None and role != "template":
            run = replace_option(run, option, locate_model(path, option, weights=weights and role != "tokenizer"))
    for option in run.path_mappings.values():
        found = {
            name: locate_model(path, f"{option}.{name}", weights=weights) for name, path in run.paths_at(option).items()
        }
        run = replace_option(run, option, found)
    if isinstance(run, Run):
        run = replace_option(run, "reward", _reward(run.reward, weights=weights))
    for option in ("data.train", "data.val") if weights else ():
        names = getattr(run.data, option.partition(".")[2])
        run = replace_option(run, option, tuple(file for name in names for file in data_files(name, option)))
    if run.model.path is not None:
        check_model(run.model.path)
    return run


def locate_model(path: Path, option: str, *, weights: bool = True) -> Path:
    """Return the directory of a model: the path itself, or the snapshot of the model of that name on the hub."""
    name = str(path)
    if path.exists() or not (NAME.fullmatch(name) or _is_one_word(name)):
        return path

    def lacks(snapshot: Path) -> str:
        return _lacking_weights(snapshot) if weights else ""

    patterns = (*DESCRIBES, WEIGHTS) if weights else DESCRIBES
    return _snapshot(name, "model", option, patterns, lacks, ignored=OTHER_LAYOUTS) or path


def _is_one_word(name: str) -> bool:
    """Return whether a word may name a model of the hub: one in the cache, or any, if downloads are allowed. Else it is
    the name of a directory."""
    if not ONE_WORD.fullmatch(name):
        return False
    return may_download() or (Path(hf_constants.HF_HUB_CACHE) / f"models--{name}").is_dir()


def _reward(reward: RewardFunction, *, weights: bool) -> RewardFunction:
    """Return the reward with local directories of the models that it names."""
    if isinstance(reward, RewardModelScore):
        return reward.model_copy(update={"path": locate_model(reward.path, "reward.path", weights=weights)})
    return reward.with_members({name: _reward(member, weights=weights) for name, member in reward.members().items()})


def _lacking_weights(snapshot: Path) -> str:
    """Return the first weight file that a snapshot lacks; empty if it has all."""
    index = snapshot / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{index.name} that can be read"
        return next((shard for shard in shards if not (snapshot / shard).is_file()), "")
    return "" if any(snapshot.glob(WEIGHTS)) else "model.safetensors"


def locate_data(data: DatasetLike, option: str) -> DatasetLike:
    """Return data with files in place of the names of datasets on the hub; rows stay as they are."""
    names = [data] if isinstance(data, str | Path) else data
    if isinstance(names, Sequence) and all(isinstance(name, str | Path) for name in names):
        return [file for name in names for file in data_files(str(name), option)]
    return names


def data_files(name: str, option: str = "") -> tuple[str, ...]:
    """Return the files of a dataset, or the name itself if it is a file or made by Python.

    option: the option that holds the name, if any; `data.train` takes the split of that name.
    """
    source, unnamed = split_source(name)
    dataset = parse_dataset_name(unnamed)
    if dataset is None:
        return (name,)
    card = _snapshot(dataset.name, "dataset", option, CARD, lambda _: "")
    if card is None:
        return (name,)
    files = _split_files(dataset, card, option)
    return tuple(with_source(source, str(file)) for file in files)


def _split_files(dataset: DatasetName, card: Path, option: str) -> Sequence[Path]:
    """Return the files of the requested split, all of which are local."""
    patterns = patterns_of(dataset, card / "README.md", option)

    def lacks(snapshot: Path) -> str:
        return lacking_shards(dataset, patterns, snapshot)

    snapshot = _snapshot(dataset.name, "dataset", option, patterns.downloaded, lacks, ignored=patterns.ignored)
    return patterns.files(dataset, snapshot or card, option)


def _snapshot(
    name: str,
    kind: Kind,
    option: str,
    patterns: Sequence[str],
    find_missing: Callable[[Path], str],
    *,
    ignored: Sequence[str] = (),
) -> Path | None:
    """Return a snapshot in the hub's cache that has the requested files, downloaded if that is allowed.

    Return None if nothing is cached, no download is allowed, and the name reads as a path whose parent exists here.
    find_missing: returns the first file that a snapshot lacks.
    """

    def snapshot(*, here: bool) -> Path:
        path = hf.snapshot_download(
            name, repo_type=kind, allow_patterns=[*patterns], ignore_patterns=[*ignored], local_files_only=here
        )
        return Path(path)

    missing = ""
    try:
        cached = snapshot(here=True)
        missing = find_missing(cached)
        if not missing:
            return cached
    except hf_errors.IncompleteSnapshotError:
        missing = "some of its files"
    except hf_errors.LocalEntryNotFoundError:
        pass
    except hf_errors.HFValidationError:  # a path that no repository could have
        return None
    if not may_download():
        if not missing and Path(name).parent.exists():
            return None
        raise ConfigError(_not_here(name, kind, option, missing))
    get_logger("recipes").info("Downloading the %s %s from the Hugging Face hub into its cache.", _WORD[kind], name)
    fetched = _downloaded(snapshot, name, kind, option)
    missing = find_missing(fetched)
    if missing:
        raise ConfigError(
            f"{_asked_as(option, name)} names a {_WORD[kind]} of the Hugging Face hub that has no {missing}"
            + (": Etude reads weights from .safetensors files alone. Choose another." if kind == "model" else ".")
        )
    return fetched


def _asked_as(option: str, name: str) -> str:
    return f"`{option}={name}`" if option else f"`{name}`"


_WORD = {"model": "model", "dataset": "data set"}


def _not_here(name: str, kind: Kind, option: str, missing: str) -> str:
    state = (
        f"is in the Hugging Face hub's cache without {missing}" if missing else "is not in the Hugging Face hub's cache"
    )
    command = f"hf download {name}" + (" --repo-type dataset" if kind == "dataset" else "")
    what = "directory" if kind == "model" else "file"
    return (
        f"{_asked_as(option, name)} is no {what} (seen from {Path.cwd()}), and the {_WORD[kind]} of that name "
        f"{state}. Give a {what} that is there; or download it once, by `{command}`, or by this command with "
        f"ETUDE_DOWNLOAD=1 set in the environment."
    )


def _downloaded(snapshot: Callable[..., Path], name: str, kind: Kind, option: str) -> Path:
    """Download with huggingface_hub, which shows the progress; turn its errors into sentences."""
    try:
        return snapshot(here=False)
    except hf_errors.GatedRepoError as error:
        why = (
            f"its authors require an agreement first: accept it on {_page(name, kind)}, and log in with `hf auth login`"
        )
        cause: Exception = error
    except hf_errors.RepositoryNotFoundError as error:
        why = (
            f"the hub has no {_WORD[kind]} of that name that this login may read. Correct the name; or, if it is "
            "private, log in with `hf auth login`, or set HF_TOKEN"
        )
        cause = error
    except (hf_errors.LocalEntryNotFoundError, hf_errors.HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        why, cause = f"the hub could not be reached, or broke off: {_first_line(error)}", error
    what = "directory" if kind == "model" else "file"
    raise ConfigError(
        f"{_asked_as(option, name)} is no {what} (seen from {Path.cwd()}). It was to be downloaded from the "
        f"Hugging Face hub, and {why}."
    ) from cause


def _page(name: str, kind: Kind) -> str:
    return f"{hf.constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"


def _first_line(error: Exception) -> str:
    """Return the first line of the error that came first."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")


def check_push(name: str) -> None:
    """Refuse an upload that is bound to fail, before a model is written for it."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"`--push {name}` names no repository of the Hugging Face hub. Write it as `--push you/name`."
        )
    if hf.get_token() is None:
        raise ConfigError(
            f"`--push {name}` uploads to the Hugging Face hub, and there is no token for it. Log in with `hf auth "
            "login`, or set HF_TOKEN; the token must allow writing."
        )


def push(directory: Path, name: str, *, private: bool) -> str:
    """Upload a directory as a model of the hub, created if it does not exist; return its address.

    private: make a new one visible only to its owner. An existing one keeps its visibility.
    """
    hub = hf.HfApi()
    try:
        hub.create_repo(name, exist_ok=True, private=private or None)
        hub.upload_folder(repo_id=name, folder_path=directory, commit_message="Upload a model trained with Etude")
    except (hf_errors.HfHubHTTPError, hf_errors.HFValidationError, httpx2.HTTPError, OSError) as error:
        raise RunError(
            f"The model was written to {directory}, and could not be uploaded to {name}: {_first_line(error)}. Once "
            f"that is fixed, `hf upload {name} {directory}` uploads it."
        ) from error
    return _page(name, "model")
