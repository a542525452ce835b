"""Small random transformers of xDiT's models, called through its wrappers as its pipelines call them.

Each is built once in a rank, then readied for every new runtime state. Latents go in and come out whole: models whose
pipelines slice rows have them sliced and gathered here. Importing this imports xDiT: only ranks do.
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
"""By name."""
