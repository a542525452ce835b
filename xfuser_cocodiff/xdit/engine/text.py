"""What xDiT does with text that lies in the sequence: ranks share it, or each of them has all of it."""

from xfuser_cocodiff.xdit.patching.log import note

_IN_SEQUENCE = ("xFuserFlux1", "xFuserFluxT", "xFuserSD3", "xFuserCogVideoX", "xFuserHunyuanVideo")
"""Beginnings of the names of xDiT's transformers that share the text among ranks, where it divides."""


def is_whole() -> bool:
    """Whether each rank has all of the text; xDiT says so once a pipeline has been called."""
    from xfuser.core.distributed import get_runtime_state

    return not getattr(get_runtime_state(), "split_text_embed_in_sp", True)


def tell_if_whole(model: str) -> None:
    """Say so, and what to do about it, where another length of text would divide.

    Args:
        model: the class of the transformer.
    """
    from xfuser.core.distributed import get_pipeline_parallel_world_size
    from xfuser.core.distributed import get_sequence_parallel_world_size as ranks

    if is_whole() and get_pipeline_parallel_world_size() == 1 and model.startswith(_IN_SEQUENCE):
        note(
            f"the tokens of the text do not divide by the {ranks()} ranks that share a sequence: each of them has all "
            "of them. With another --max_sequence_length, such that they divide, less travels and less is computed"
        )
