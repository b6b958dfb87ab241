"""Weights for SGLang: from files, from buckets by one endpoint for each kind, or as adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from etude.errors import EngineError, EtudeError
from etude.rollout.server_backend import ServerBackend
from etude.rollout.server_client import HttpClient

if TYPE_CHECKING:
    from etude.sync.transport import Bucket, WeightReceiver


class SglangWeights(ServerBackend):
    """SGLang 0.5.23's endpoints for weights."""

    label_path: ClassVar[str] = "/model_info"
    resume_path: ClassVar[str] = "/continue_generation"
    sleep_path: ClassVar[str] = "/release_memory_occupation"
    wake_path: ClassVar[str] = "/resume_memory_occupation"
    update_paths: ClassVar[tuple[str, str]] = "/begin_weight_update", "/end_weight_update"
    paths: ClassVar[frozenset[str]] = frozenset(
        {
            "/abort_request",
            "/begin_weight_update",
            "/continue_generation",
            "/end_weight_update",
            "/flush_cache",
            "/model_info",
            "/pause_generation",
            "/server_info",
            "/update_weight_version",
            "/update_weights_from_disk",
            "/update_weights_from_tensor",
        }
    )

    async def pause(self, client: HttpClient) -> None:
        await client.post("/pause_generation", {"mode": "in_place"})

    async def pause_for_update(self, client: HttpClient) -> None:
        """Pause in place, or with `kv=recompute` put the requests under way back into the queue without their cache."""
        await client.post("/pause_generation", {"mode": "in_place" if self.kv == "keep" else "retract"})

    async def wake(self, client: HttpClient) -> None:
        await client.post(self.wake_path, {"tags": ["weights"]} if self.discards_weights else None)

    async def wake_cache(self, client: HttpClient) -> None:
        await client.post(self.wake_path, {"tags": ["kv_cache", "cuda_graph"]})

    async def abort(self, client: HttpClient) -> None:
        await client.post("/abort_request", {"rid": "", "abort_all": True})

    async def set_version_label(self, client: HttpClient, version: int) -> None:
        await client.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def load(self, client: HttpClient, directory: Path, version: int) -> None:
        await self.pause_for_update(client)
        label = {"weight_version": str(version), "flush_cache": self.kv == "recompute"}
        reply = await client.post("/update_weights_from_disk", {"model_path": str(directory.resolve()), **label})
        if not (isinstance(reply, Mapping) and reply.get("success")):  # it may refuse with status 200
            raise EngineError(f"The SGLang server at {client.url} did not load {directory}: {reply}")
        await self.resume(client)

    async def load_bucket(self, server: WeightReceiver, bucket: Bucket) -> None:
        if bucket.kind == "disk":
            path, body = "/update_weights_from_disk", {"model_path": bucket.where["directory"]}
        elif bucket.kind == "group":
            path = "/update_weights_from_distributed"
            body = {
                "names": [piece.name for piece in bucket.pieces],
                "dtypes": [piece.dtype for piece in bucket.pieces],
                "shapes": [list(piece.shape) for piece in bucket.pieces],
                "group_name": bucket.where["group"],
            }
        else:
            assert bucket.tensor_handles is not None, f"a {bucket.kind} bucket comes with handles"
            path = "/update_weights_from_tensor"
            body = {"serialized_named_tensors": [bucket.tensor_handles(server)] * server.ranks}
        await _post_checked(server, path, {**body, "flush_cache": False})

    async def finish_update(self, server: WeightReceiver) -> None:
        await _post_checked(server, "/end_weight_update")
        if self.kv == "recompute":
            await server.post("/flush_cache")  # it refuses with status 400; no wait time, for requests are paused

    async def join_group(self, server: WeightReceiver, group: Mapping[str, Any]) -> None:
        request = {
            "master_address": group["address"],
            "master_port": group["port"],
            "rank_offset": 1,
            "world_size": group["size"],
            "group_name": group["name"],
            "backend": group["backend"],
        }
        with suppress(EtudeError):
            await server.post("/destroy_weights_update_group", {"group_name": group["name"]})
        await _post_checked(server, "/init_weights_update_group", request)

    async def adapter_limit(self, client: HttpClient) -> int:
        """Return the least of its limits that /server_info reports."""
        info = json.loads(await client.get("/server_info"))
        limits = [info[name] for name in ("max_loras_per_batch", "max_loaded_loras") if info.get(name) is not None]
        return min(limits, default=0) if info.get("enable_lora") else 0

    def adapter_remedy(self, adapters: int) -> str:
        args = " ".join(adapter_args(adapters))
        return f"Start it with {args} and without `--max-loaded-loras`, or lower `max_staleness`."


def adapter_args(adapters: int) -> list[str]:
    """Return the arguments for so many adapters in a batch. The number of loaded ones has no limit by default."""
    return ["--enable-lora", "--max-loras-per-batch", str(adapters)]


async def _post_checked(server: WeightReceiver, path: str, body: Mapping[str, Any] | None = None) -> None:
    """Send a request, and raise an error if the reply says `success: false`."""
    reply = await server.post(path, body)
    if isinstance(reply, Mapping) and reply.get("success") is False:
        raise EngineError(f"{server.url} answered {path} without success: {reply.get('message', reply)}")
