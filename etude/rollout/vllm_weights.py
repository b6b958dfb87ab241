"""Weights for vLLM: from files, from buckets through Etude's plug-in, or as adapters.

The plug-in (`plugins/vllm_weights`) serves every kind of bucket. It is a separate distribution: users who start servers
by hand install it into the servers' environment. For a server that Etude starts, `install_plugin` writes the same files
to a directory, in the layout of an installer. The server gets this directory in its PYTHONPATH, so no environment is
changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from etude.errors import EngineError
from etude.rollout.server_backend import ServerBackend
from etude.rollout.server_client import HttpClient

if TYPE_CHECKING:
    from etude.sync.transport import Bucket, WeightReceiver

PLUGIN = "etude_vllm_weights"
_THIS_FILE = Path(__file__).resolve()
_SOURCES = (_THIS_FILE.parents[2] / "plugins" / "vllm_weights" / PLUGIN, _THIS_FILE.with_name(PLUGIN))
"""The places of the plug-in: in the repository, and in an installed Etude."""


LORA_METRIC = "vllm:lora_requests_info"
"""The metric that a server with adapters has."""
LORA_PATTERN = re.compile(LORA_METRIC + r'\{.*max_lora="(\d+)"')
LIMIT_DELAYS = (0.0, 0.1, 0.5, 2.0, 2.0)
"""Seconds before each look at the metric: the server sets it a moment after its first token."""


class VllmWeights(ServerBackend):
    """vLLM 0.32's endpoints for weights, with VLLM_SERVER_DEV_MODE=1, and the plug-in for buckets."""

    label_path: ClassVar[str] = "/weight_info"
    resume_path: ClassVar[str] = "/resume"
    sleep_path: ClassVar[str] = "/sleep?level=1"  # the weights go to the CPU's memory; level 2 drops them
    wake_path: ClassVar[str] = "/wake_up"
    update_paths: ClassVar[tuple[str, str]] = "/start_weight_update", "/finish_weight_update"
    adapters_path: ClassVar[str] = "/v1"
    paths: ClassVar[frozenset[str]] = frozenset(
        {
            "/abort_requests",
            "/collective_rpc",
            "/finish_weight_update",
            "/pause",
            "/reset_prefix_cache",
            "/resume",
            "/start_weight_update",
            "/update_weight_version",
            "/update_weights",
            "/weight_info",
        }
    )

    async def pause(self, client: HttpClient) -> None:
        await client.post("/pause?mode=keep&clear_cache=false")

    async def abort(self, client: HttpClient) -> None:
        await client.post("/abort_requests")

    async def sleep(self, client: HttpClient) -> None:
        await client.post("/sleep?level=2" if self.discards_weights else self.sleep_path)

    async def wake(self, client: HttpClient) -> None:
        await client.post(f"{self.wake_path}?tags=weights" if self.discards_weights else self.wake_path)

    async def wake_cache(self, client: HttpClient) -> None:
        await client.post(f"{self.wake_path}?tags=kv_cache")

    async def set_version_label(self, client: HttpClient, version: int) -> None:
        await client.post("/update_weight_version", {"new_version": str(version)})

    async def load(self, client: HttpClient, directory: Path, version: int) -> None:
        await self.pause(client)
        path = str(directory.resolve())
        await client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        await self._drop_cache(client)
        await self.set_version_label(client, version)
        await self.resume(client)

    async def load_bucket(self, server: WeightReceiver, bucket: Bucket) -> None:
        pieces = [[piece.name, piece.dtype, list(piece.shape), piece.offset] for piece in bucket.pieces]
        update_info = {"kind": bucket.kind, "pieces": pieces, "where": dict(bucket.where)}
        await server.post("/update_weights", {"update_info": update_info})

    async def finish_update(self, server: WeightReceiver) -> None:
        await server.post("/finish_weight_update")
        await self._drop_cache(server)

    async def join_group(self, server: WeightReceiver, group: Mapping[str, Any]) -> None:
        await server.post("/init_weight_transfer_engine", {"init_info": {"group": dict(group)}})

    async def _drop_cache(self, server: HttpClient | WeightReceiver) -> None:
        """With `kv=recompute`, drop all cached keys and values. Running requests are computed once more."""
        if self.kv == "keep":
            return
        path = "/reset_prefix_cache?reset_running_requests=true"
        reply = await server.post(path)
        if not (isinstance(reply, Mapping) and reply.get("success")):  # it may refuse with status 200
            raise EngineError(
                f"The vLLM server at {server.url} did not drop the prefix cache of the old weights ({path}): {reply}"
            )

    async def adapter_limit(self, client: HttpClient) -> int:
        """Return `--max-loras`, as its metrics report it once it has drawn a token."""
        for delay in LIMIT_DELAYS:
            await asyncio.sleep(delay)
            metrics = await client.get("/metrics")
            if LORA_METRIC not in metrics:
                return 0
            if found := LORA_PATTERN.search(metrics):
                return int(found.group(1))
            if not delay:
                await client.post("/inference/v1/generate", {"token_ids": [0], "sampling_params": {"max_tokens": 1}})
        return 0

    def adapter_remedy(self, adapters: int) -> str:
        args = " ".join(adapter_args(adapters))
        return f"Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and {args}, or lower `max_staleness`."


def adapter_args(adapters: int) -> list[str]:
    """Return the arguments for so many adapters in a batch.

    In the processor's memory there is room for twice as many. So vLLM does not drop one there that a rollout will use
    again; it would do so without a word, and read the files again for the next request.
    """
    return ["--enable-lora", "--max-loras", str(adapters), "--max-cpu-loras", str(2 * adapters)]


def install_plugin(cache: Path) -> Path:
    """Return the directory for PYTHONPATH, below `cache`; write it if it is missing.

    Its name holds a hash of the plug-in's files, so another version gets another directory.
    """
    source = next((path for path in _SOURCES if path.is_dir()), None)
    if source is None:
        raise EngineError(f"Etude's plug-in for vLLM was not found: {_SOURCES[1]} is missing. Reinstall Etude.")
    files = sorted(source.glob("*.py"))
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]
    made = cache / f"{PLUGIN}-{digest}"
    if not made.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{made.name}.", dir=cache) as own:  # other processes may write the same now
            draft = Path(own) / made.name
            _write(draft, files)
            try:
                draft.rename(made)
            except OSError:
                if not made.is_dir():
                    raise
    return made


def _write(draft: Path, files: Sequence[Path]) -> None:
    """Write these files in the layout of an installed distribution."""
    (draft / PLUGIN).mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, draft / PLUGIN / file.name)
    info = draft / f"{PLUGIN}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: etude-vllm-weights\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\netude_weights = {PLUGIN}:register\n", "utf-8")
