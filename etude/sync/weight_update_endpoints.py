"""The servers' endpoints for weights: they begin, load and finish an update.

Both kinds of server have update sessions. For vLLM the plug-in of `plugins/vllm_weights` serves every kind of bucket;
SGLang has a separate endpoint for each kind.

With `kv=recompute` the prefix cache of the old weights is dropped before an update counts as done, and requests that
wait in a pause recompute their own KV cache. With `kv=keep` both stay. Later requests then share nothing with earlier
ones, because each request names the weights that it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from etude.errors import EngineError, EtudeError, UnknownChoiceError
from etude.sync.transport import Bucket, WeightReceiver


class WeightUpdateEndpoints:
    """The weight update of one kind of server."""

    async def begin_update(self, server: WeightReceiver) -> None:
        """Open a session. One that an earlier failure left open is closed first."""
        raise NotImplementedError

    async def load(self, server: WeightReceiver, bucket: Bucket) -> None:
        """Have the server load a bucket over its own weights."""
        raise NotImplementedError

    async def finish_update(self, server: WeightReceiver) -> None:
        """Close the session: the server repacks packed weights. With `kv=recompute` it drops its caches."""
        raise NotImplementedError

    async def join_group(self, server: WeightReceiver, group: Mapping[str, Any]) -> None:
        """Have all ranks of the server join a process group in which the sender is rank 0."""
        raise NotImplementedError


class VllmWeightUpdateEndpoints(WeightUpdateEndpoints):
    """vLLM 0.32, with the plug-in and VLLM_SERVER_DEV_MODE=1."""

    async def begin_update(self, server: WeightReceiver) -> None:
        try:
            await server.post("/start_weight_update", {})
        except EtudeError:
            with suppress(EtudeError):  # no session may be open, and the failure another
                await server.post("/finish_weight_update", {})
            await server.post("/start_weight_update", {})

    async def load(self, server: WeightReceiver, bucket: Bucket) -> None:
        pieces = [[piece.name, piece.dtype, list(piece.shape), piece.offset] for piece in bucket.pieces]
        update_info = {"kind": bucket.kind, "pieces": pieces, "where": dict(bucket.where)}
        await server.post("/update_weights", {"update_info": update_info})

    async def finish_update(self, server: WeightReceiver) -> None:
        await server.post("/finish_weight_update", {})
        if server.backend.kv == "keep":
            return
        path = "/reset_prefix_cache?reset_running_requests=true"
        reply = await server.post(path, {})
        if not (isinstance(reply, Mapping) and reply.get("success")):  # it may refuse with status 200
            raise EngineError(f"{server.url} did not drop the prefix cache of the old weights ({path}): {reply}")

    async def join_group(self, server: WeightReceiver, group: Mapping[str, Any]) -> None:
        await server.post("/init_weight_transfer_engine", {"init_info": {"group": dict(group)}})


class SglangWeightUpdateEndpoints(WeightUpdateEndpoints):
    """SGLang 0.5.23."""

    async def begin_update(self, server: WeightReceiver) -> None:
        try:
            await server.post("/begin_weight_update", {})
        except EtudeError:
            with suppress(EtudeError):
                await server.post("/end_weight_update", {})
            await server.post("/begin_weight_update", {})

    async def load(self, server: WeightReceiver, bucket: Bucket) -> None:
        await _post_checked(server, *_SGLANG_REQUESTS[bucket.kind](server, bucket))

    async def finish_update(self, server: WeightReceiver) -> None:
        await _post_checked(server, "/end_weight_update", {})
        if server.backend.kv == "recompute":
            await server.post("/flush_cache", {})  # it refuses with status 400; no wait time, for requests are paused

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


def _as_tensor_handles(server: WeightReceiver, bucket: Bucket) -> tuple[str, dict[str, Any]]:
    assert bucket.tensor_handles is not None, f"a {bucket.kind} bucket comes with handles"
    handles = bucket.tensor_handles(server)
    return "/update_weights_from_tensor", {
        "serialized_named_tensors": [handles] * server.ranks,
        "flush_cache": False,
    }


def _from_disk(_: WeightReceiver, bucket: Bucket) -> tuple[str, dict[str, Any]]:
    return "/update_weights_from_disk", {"model_path": bucket.where["directory"], "flush_cache": False}


def _broadcast(_: WeightReceiver, bucket: Bucket) -> tuple[str, dict[str, Any]]:
    return "/update_weights_from_distributed", {
        "names": [piece.name for piece in bucket.pieces],
        "dtypes": [piece.dtype for piece in bucket.pieces],
        "shapes": [list(piece.shape) for piece in bucket.pieces],
        "group_name": bucket.where["group"],
        "flush_cache": False,
    }


_SGLANG_REQUESTS: Mapping[str, Callable[[WeightReceiver, Bucket], tuple[str, dict[str, Any]]]] = {
    "shm": _as_tensor_handles,
    "ipc": _as_tensor_handles,
    "disk": _from_disk,
    "group": _broadcast,
}
_WEIGHT_UPDATERS: Mapping[str, WeightUpdateEndpoints] = {
    "vllm": VllmWeightUpdateEndpoints(),
    "sglang": SglangWeightUpdateEndpoints(),
}


def get_weight_update_endpoints(server: WeightReceiver) -> WeightUpdateEndpoints:
    """Return the weight update endpoints of this kind of server."""
    name = server.backend.name
    if name not in _WEIGHT_UPDATERS:
        raise UnknownChoiceError(
            f"Weights cannot be published to {server.url}: its kind is '{name}', and Etude supports "
            f"{' and '.join(_WEIGHT_UPDATERS)}."
        )
    return _WEIGHT_UPDATERS[name]


async def _post_checked(server: WeightReceiver, path: str, body: Mapping[str, Any]) -> None:
    """Send a request, and raise an error if the reply says `success: false`."""
    reply = await server.post(path, body)
    if isinstance(reply, Mapping) and reply.get("success") is False:
        raise EngineError(f"{server.url} answered {path} without success: {reply.get('message', reply)}")
