"""A hint for text tokens that xDiT replicates on all ranks, since they are not divisible by the number of ranks."""

from xfuser_cocodiff.xdit.patching.log import info_once

_TEXT_IN_SEQUENCE = ("xFuserFlux1", "xFuserFluxT", "xFuserSD3", "xFuserCogVideoX", "xFuserHunyuanVideo")
"""Prefixes of the class names of xDiT's transformers that shard the text where it is divisible."""


def log_if_replicated(model: str) -> bool:
    """Log a hint if the text tokens are replicated although the model can shard them; return whether it was logged.

    Args:
        model: class name of the transformer.
    """
    from xfuser.core.distributed import get_pipeline_parallel_world_size, get_runtime_state
    from xfuser.core.distributed import get_sequence_parallel_world_size as ranks

    # xDiT sets this in the first call of a pipeline.
    is_replicated = not getattr(get_runtime_state(), "split_text_embed_in_sp", True)
    if not (is_replicated and get_pipeline_parallel_world_size() == 1 and model.startswith(_TEXT_IN_SEQUENCE)):
        return False
    info_once(
        f"the text tokens are not divisible by the {ranks()} ranks and are replicated on each of them; a divisible "
        "--max_sequence_length needs less communication and computation"
    )
    return True
