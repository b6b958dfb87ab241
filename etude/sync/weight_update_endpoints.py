"""How the servers speak of weights: the endpoints that begin, carry and finish an update, and tell the version.

Both know sessions. vLLM's are answered by the plug-in of `plugins/vllm_weights`, which fetches every kind of parcel;
SGLang has an endpoint of its own for each kind. Whatever a server has kept of old weights' attention is dropped before
the update counts as done, and requests that wait in a pause compute their own anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from etude.errors import EngineError, EtudeError, UnknownChoiceError
from etude.sync.transport import Bucket, WeightReceiver

__all__ = ["WeightUpdateEndpoints", "get_weight_update_endpoints"]


class WeightUpdateEndpoints:
    """How one kind of server is brought to other weights."""

    async def pause(self, server: WeightReceiver) -> None:
        """Stop between two tokens; what is under way stays, and computes what it had attended to anew afterwards."""
        raise NotImplementedError

    async def begin_update(self, server: WeightReceiver) -> None:
        """Open a session. One that an earlier failure left open is closed first."""
        raise NotImplementedError

    async def load(self, server: WeightReceiver, bucket: Bucket) -> None:
        """Have it fetch a parcel and write it over its own."""
        raise NotImplementedError

    async def finish_update(self, server: WeightReceiver) -> None:
        """Close the session: what was packed is packed anew, and what was cached is dropped."""
        raise NotImplementedError

    async def join_group(self, server: WeightReceiver, group: Mapping[str, Any]) -> None:
        """Have all its ranks join a process group that the sender is the first of."""
        raise NotImplementedError


class VllmWeightUpdateEndpoints(WeightUpdateEndpoints):
    """vLLM 0.32, with the plug-in and VLLM_SERVER_DEV_MODE=1."""

    async def pause(self, server: WeightReceiver) -> None:
        await server.post("/pause?mode=keep&clear_cache=false", {})

    async def begin_update(self, server: WeightReceiver) -> None:
        try:
            await server.post("/start_weight_update", {})
        except EtudeError:
            with suppress(EtudeError):  # it may be that nothing was open, and something else is wrong
                await server.post("/finish_weight_update", {})
            await server.post("/start_weight_update", {})

    async def load(self, server: WeightReceiver, bucket: Bucket) -> None:
        pieces = [[piece.name, piece.dtype, list(piece.shape), piece.offset] for piece in bucket.pieces]
        update_info = {"kind": bucket.kind, "pieces": pieces, "where": dict(bucket.where)}
        await server.post("/update_weights", {"update_info": update_info})

    async def finish_update(self, server: WeightReceiver) -> None:
        await server.post("/finish_weight_update", {})
        await _post_checked(server, "/reset_prefix_cache?reset_running_requests=true", {})

    async def join_group(self, server: WeightReceiver, group: Mapping[str, Any]) -> None:
        await server.post("/init_weight_transfer_engine", {"init_info": {"group": dict(group)}})


class SglangWeightUpdateEndpoints(WeightUpdateEndpoints):
    """SGLang 0.5.23."""

    async def pause(self, server: WeightReceiver) -> None:
        await server.post("/pause_generation", {"mode": "retract"})

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
        await server.post("/flush_cache", {})  # with a time to wait it would wait for those whom the pause holds

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
    assert bucket.tensor_handles is not None, f"a {bucket.kind} parcel comes with handles"
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
    """How this server is spoken to."""
    name = server.backend.name
    if name not in _WEIGHT_UPDATERS:
        raise UnknownChoiceError(
            f"Weights cannot be brought to {server.url}: it speaks '{name}', and carriers speak "
            f"{' and '.join(_WEIGHT_UPDATERS)}."
        )
    return _WEIGHT_UPDATERS[name]


async def _post_checked(server: WeightReceiver, path: str, body: Mapping[str, Any]) -> None:
    """Ask, and take an answer that says it was without success for what it is."""
    reply = await server.post(path, body)
    if isinstance(reply, Mapping) and reply.get("success") is False:
        raise EngineError(f"{server.url} answered {path} without success: {reply.get('message', reply)}")
