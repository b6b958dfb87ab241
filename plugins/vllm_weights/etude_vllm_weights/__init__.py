"""Lets a vLLM server take its weights from an Etude trainer: a weight-transfer backend named `etude`."""

__version__ = "1.0"


def register() -> None:
    """Tell vLLM of the backend. vLLM calls this in each of its processes, perhaps more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "etude" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("etude", "etude_vllm_weights.engine", "EtudeWeights")
