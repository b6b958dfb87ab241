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
from etude.sync.server import Parcel, Server

__all__ = ["Dialect", "dialect"]


class Dialect:
    """How one kind of server is brought to other weights."""

    async def hold(self, server: Server) -> None:
        """Stop between two tokens; what is under way stays, and computes what it had attended to anew afterwards."""
        raise NotImplementedError

    async def begin(self, server: Server) -> None:
        """Open a session. One that an earlier failure left open is closed first."""
        raise NotImplementedError

    async def load(self, server: Server, parcel: Parcel) -> None:
        """Have it fetch a parcel and write it over its own."""
        raise NotImplementedError

    async def finish(self, server: Server) -> None:
        """Close the session: what was packed is packed anew, and what was cached is dropped."""
        raise NotImplementedError

    async def join(self, server: Server, group: Mapping[str, Any]) -> None:
        """Have all its ranks join a process group that the sender is the first of."""
        raise NotImplementedError


class Vllm(Dialect):
    """vLLM 0.32, with the plug-in and VLLM_SERVER_DEV_MODE=1."""

    async def hold(self, server: Server) -> None:
        await server.post("/pause?mode=keep&clear_cache=false", {})

    async def begin(self, server: Server) -> None:
        try:
            await server.post("/start_weight_update", {})
        except EtudeError:
            with suppress(EtudeError):  # it may be that nothing was open, and something else is wrong
                await server.post("/finish_weight_update", {})
            await server.post("/start_weight_update", {})

    async def load(self, server: Server, parcel: Parcel) -> None:
        pieces = [[piece.name, piece.dtype, list(piece.shape), piece.offset] for piece in parcel.pieces]
        told = {"kind": parcel.kind, "pieces": pieces, "where": dict(parcel.where)}
        await server.post("/update_weights", {"update_info": told})

    async def finish(self, server: Server) -> None:
        await server.post("/finish_weight_update", {})
        await _agreed(server, "/reset_prefix_cache?reset_running_requests=true", {})

    async def join(self, server: Server, group: Mapping[str, Any]) -> None:
        await server.post("/init_weight_transfer_engine", {"init_info": {"group": dict(group)}})


class Sglang(Dialect):
    """SGLang 0.5.23."""

    async def hold(self, server: Server) -> None:
        await server.post("/pause_generation", {"mode": "retract"})

    async def begin(self, server: Server) -> None:
        try:
            await server.post("/begin_weight_update", {})
        except EtudeError:
            with suppress(EtudeError):
                await server.post("/end_weight_update", {})
            await server.post("/begin_weight_update", {})

    async def load(self, server: Server, parcel: Parcel) -> None:
        await _agreed(server, *_SGLANG[parcel.kind](server, parcel))

    async def finish(self, server: Server) -> None:
        await _agreed(server, "/end_weight_update", {})
        await server.post("/flush_cache", {})  # with a time to wait it would wait for those whom the pause holds

    async def join(self, server: Server, group: Mapping[str, Any]) -> None:
        told = {
            "master_address": group["address"],
            "master_port": group["port"],
            "rank_offset": 1,
            "world_size": group["size"],
            "group_name": group["name"],
            "backend": group["backend"],
        }
        with suppress(EtudeError):
            await server.post("/destroy_weights_update_group", {"group_name": group["name"]})
        await _agreed(server, "/init_weights_update_group", told)


def _handed(server: Server, parcel: Parcel) -> tuple[str, dict[str, Any]]:
    assert parcel.handed is not None, f"a {parcel.kind} parcel comes with handles"
    handles = parcel.handed(server)
    return "/update_weights_from_tensor", {
        "serialized_named_tensors": [handles] * server.ranks,
        "flush_cache": False,
    }


def _from_disk(_: Server, parcel: Parcel) -> tuple[str, dict[str, Any]]:
    return "/update_weights_from_disk", {"model_path": parcel.where["directory"], "flush_cache": False}


def _broadcast(_: Server, parcel: Parcel) -> tuple[str, dict[str, Any]]:
    return "/update_weights_from_distributed", {
        "names": [piece.name for piece in parcel.pieces],
        "dtypes": [piece.dtype for piece in parcel.pieces],
        "shapes": [list(piece.shape) for piece in parcel.pieces],
        "group_name": parcel.where["group"],
        "flush_cache": False,
    }


_SGLANG: Mapping[str, Callable[[Server, Parcel], tuple[str, dict[str, Any]]]] = {
    "shm": _handed,
    "ipc": _handed,
    "disk": _from_disk,
    "group": _broadcast,
}
_DIALECTS: Mapping[str, Dialect] = {"vllm": Vllm(), "sglang": Sglang()}


def dialect(server: Server) -> Dialect:
    """How this server is spoken to."""
    name = server.dialect.name
    if name not in _DIALECTS:
        raise UnknownChoiceError(
            f"Weights cannot be brought to {server.url}: it speaks '{name}', and carriers speak "
            f"{' and '.join(_DIALECTS)}."
        )
    return _DIALECTS[name]


async def _agreed(server: Server, path: str, body: Mapping[str, Any]) -> None:
    """Ask, and take an answer that says it was without success for what it is."""
    told = await server.post(path, body)
    if isinstance(told, Mapping) and told.get("success") is False:
        raise EngineError(f"{server.url} answered {path} without success: {told.get('message', told)}")
