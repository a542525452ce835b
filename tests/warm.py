"""Imports of the server that ranks are forked from, done once because they take seconds."""

import contextlib
import gc
import importlib
import importlib.util
import os
from unittest import mock

gc.disable()  # imported objects stay alive; scanning them repeatedly takes a fifth of the time

for name in (
    "pytest",  # and Hypothesis: needed only to import test modules
    "hypothesis.strategies",
    "tests.ranks",
    "tests.small_transformers",
    "xfuser_cocodiff.tools.comparison.quality",
    *(f"small_models.{model}" for model in ("flux1", "flux2", "qwen_image", "sd35")),
):
    importlib.import_module(name)
# Probes of links within one machine with larger messages would take most of a session's start and show nothing.
importlib.import_module("xfuser_cocodiff.engine.autotune.link_probe")._LAST_BYTES = 2**15
importlib.import_module("xfuser_cocodiff.xdit.session.usp_versions").is_known()  # whose result is cached
with contextlib.suppress(ImportError, AttributeError):  # patterns of names of weights, which take a fifth of a second
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("t5")
if os.environ.get("TRITON_INTERPRET") and importlib.util.find_spec("triton"):
    importlib.import_module("tests.interpreter").patch_language_once_per_launch()
with mock.patch.dict(os.environ):  # it sets a default rank and port if there are none
    importlib.import_module("xfuser.runner")

gc.collect()
gc.enable()
gc.freeze()  # a garbage collection in a rank would copy every page with an object
