"""An agent gets the images of its task as data URLs, in place of their addresses."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import etude
from etude.agents.task_images import load_task_images
from etude.data import Dataset
from etude.images.addresses import to_data_url
from etude.records import Task
from etude.store import Status, open_store
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import RolloutRequest
from tests.agents.rollout_queues import ONCE, played
from tests.data.test_task_images import RED

URL = to_data_url(RED, "image/png")
ROW: dict[str, Any] = {
    "prompt": [{"role": "user", "content": "<image>?"}],
    "images": [RED],
    "extra_info": {"seen": [URL], "n": 3, "text": "image:none"},
}


def issued() -> Task:
    return Dataset.load([ROW], requires_prompt=False).task(0, 0)


def test_addresses_become_data_urls() -> None:
    async def story() -> Task:
        with closing(open_store()) as store:
            queue = LocalRolloutQueue(store)
            task = issued()
            await queue.put_images(list(task.images.values()))
            try:
                return await load_task_images(Task(task.ordinal, task.fields, "s"), queue)
            finally:
                await queue.close()

    task = asyncio.run(story())
    assert task["prompt"][0]["content"][0] == {"type": "image_url", "image_url": {"url": URL}}
    assert (task["images"], task["extra_info"], task.source) == ([URL], ROW["extra_info"], "s")


def test_a_task_whose_image_is_lost_is_an_infrastructure_error() -> None:
    seen = list[Any]()

    @etude.agent
    def agent(task: Task) -> float:
        seen.append(task)
        return 1.0

    result = played(agent, [RolloutRequest(issued(), limits=ONCE)])
    assert result.only.status is Status.INFRA_ERROR and "shows the image" in result.error and not seen
