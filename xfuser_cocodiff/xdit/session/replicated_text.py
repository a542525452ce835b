"""A hint for text that xDiT replicates on all ranks because its tokens do not divide among them."""

from xfuser_cocodiff.xdit.patching.log import info_once

_IN_SEQUENCE = ("xFuserFlux1", "xFuserFluxT", "xFuserSD3", "xFuserCogVideoX", "xFuserHunyuanVideo")
"""Prefixes of the class names of xDiT's transformers that split the text among ranks where it divides."""


def warn_if_replicated(model: str) -> bool:
    """Say so where another length of text would divide; return whether it was said.

    Args:
        model: the class of the transformer.
    """
    from xfuser.core.distributed import get_pipeline_parallel_world_size, get_runtime_state
    from xfuser.core.distributed import get_sequence_parallel_world_size as ranks

    # Set once a pipeline has been called.
    is_replicated = not getattr(get_runtime_state(), "split_text_embed_in_sp", True)
    if not (is_replicated and get_pipeline_parallel_world_size() == 1 and model.startswith(_IN_SEQUENCE)):
        return False
    info_once(
        f"the text tokens are not divisible by the {ranks()} ranks and are replicated on each of them; a divisible "
        "--max_sequence_length needs less communication and computation"
    )
    return True
