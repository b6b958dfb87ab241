"""Refuses options of images for a model of text, and options that do not go with a vision tower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from etude.config.together import problems_of, told_together
from etude.data import Dataset
from etude.data.dataset import DEFAULT_COLUMNS
from etude.errors import ConfigError, EtudeError
from etude.images import read_image_layout
from etude.models import VisionConfig
from etude.models.vision_types import has_tower, reads_text_too
from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run
from etude.rollout import ServerConfig


@told_together
def check_vision(run: Recipe) -> Iterator[ConfigError]:
    """Refuse what the tower of the run's model does not go with; the model's directory is read."""
    where = run.model.path
    if where is None or not where.is_dir():
        return
    changed = [name for name in VisionConfig.model_fields if getattr(run.vision, name) != getattr(VisionConfig(), name)]
    if not has_tower(where, wanted=run.vision.tower):
        if changed:
            remedy = "Set `vision.tower=true`" if has_tower(where, wanted=True) else "Give a vision-language model"
            yield ConfigError(
                f"`vision.{changed[0]}` is for a model that takes images, and the model in {where} takes text alone. "
                f"{remedy}, or leave it out."
            )
        return
    if run.vision.tower and has_tower(where, wanted=False):
        yield ConfigError(
            f"`vision.tower=true` is for models that are loaded without their tower, such as Qwen3.5. The one in "
            f"{where} always has its tower. Leave it out."
        )
    yield from problems_of(partial(read_image_layout, where, run.vision.max_pixels))
    servers = run.rollout if isinstance(run, Run) and isinstance(run.rollout, ServerConfig) else None
    if run.vision.train and servers is not None and servers.adapters == "only":
        yield ConfigError(
            "`rollout.adapters=only` sends servers adapters, of which they leave out those of the vision tower, and "
            "`vision.train=true` trains some. Leave one of them out."
        )
    always = list(_conflicts(run, where))
    with_images = [] if servers is None else list(_server_refusals(run, servers, where))
    if reads_text_too(where):
        with_images = [*always, *with_images]
        always = []
    yield from map(ConfigError, always)
    if with_images and shows_images(run):
        yield from (ConfigError(f"Rows of `data.train` have images. {sentence}") for sentence in with_images)


def _conflicts(run: Recipe, where: Path) -> Iterator[str]:
    """Yield what does not go with a vision tower that is used."""
    if run.head == "value":
        yield (
            f"The model in {where} takes images, and a score of a vision-language model is not supported. Give a model "
            "that takes text alone."
        )
    if isinstance(run, Run) and run.uses_critic:
        yield (
            "This run's algorithm trains a critic, and a critic of a vision-language model is not supported. Choose "
            "one without, such as `grpo`."
        )
    for name in ("tensor", "context", "expert"):
        size = getattr(run.mesh, name)
        if size > 1:
            yield f"`mesh.{name}={size}` does not split a model with a vision tower. Set `mesh.{name}=1`."


def _server_refusals(run: Recipe, servers: ServerConfig, where: Path) -> Iterator[str]:
    """Yield the sentence with which servers refuse images of this model, if they do."""
    with suppress(ConfigError):  # `check_vision` refuses a processor that cannot be read
        layout = read_image_layout(where, run.vision.max_pixels)
        refusal = "" if layout is None else servers.create_backend().image_refusal(layout)
        if refusal:
            yield refusal


def shows_images(run: Recipe) -> bool:
    """Return True if the first row of a file of `data.train` has images. Later rows are not read here."""
    columns = run.data.columns if isinstance(run, Run) else DEFAULT_COLUMNS
    has_prompts = isinstance(run, Run) and not run.has_agents
    try:
        data = Dataset.load(run.data.train, columns, requires_prompt=has_prompts)
        return any(data.task(row, 0).images for row in data.first_rows)
    except (EtudeError, OSError):
        return False  # they are reported where the rows are loaded
