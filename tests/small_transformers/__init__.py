"""Small random transformers of xDiT's models, called through its wrappers as its pipelines call them.

Each is built once in a rank, and prepared for each new runtime state. Latents are passed and returned whole: models
whose pipelines shard rows have them sharded and gathered here. Only ranks import this package, since it imports xDiT.
"""

from tests.small_transformers import images, videos
from tests.small_transformers.base import STEPS, SmallTransformer, prepare_ranks, use

__all__ = ["MODELS", "STEPS", "SmallTransformer", "prepare_ranks", "use"]

MODELS: dict[str, type[SmallTransformer]] = {
    name: model
    for module in (images, videos)
    for name, model in vars(module).items()
    if getattr(model, "__module__", None) == module.__name__ and hasattr(model, "latent_shape")
}
"""All small transformers, by name."""
