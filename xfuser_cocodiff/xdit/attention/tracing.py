"""The layer that Dynamo is tracing."""

import re

_PART = re.compile(r"\['([^']+)'\]|\.(\w+)")
"""Step from a module to a submodule, in the notations of PyTorch's versions."""
_NO_SUBMODULES = ("_modules", "__dict__", "_orig_mod", "_module", "forward")
"""Attributes in a path that are not submodules: PyTorch's own, and that of `CallWrapper` for its module.
PyTorch 2.11 has the method of wrapped modules in it too."""


def traced_path() -> str:
    """Return the path from the compiled module to the traced one; '' if it is unknown. It is a constant of a graph."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    for node in reversed(InstructionTranslator.current_tx().output.graph.nodes):
        if stack := node.meta.get("nn_module_stack"):
            _, *parts = ("".join(match) for match in _PART.findall(list(stack.values())[-1][0]))
            return ".".join(part for part in parts if part not in _NO_SUBMODULES)
    return ""


# See :func:`overlap_collectives`.
traced_path._dynamo_marked_constant = True  # type: ignore[attr-defined]
