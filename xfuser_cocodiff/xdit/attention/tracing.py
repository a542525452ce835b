"""Where in a model a graph is being traced."""

import re

_PART = re.compile(r"\['([^']+)'\]|\.(\w+)")
"""A step from a module to a part of it, as PyTorch's versions write that."""
_NO_NAMES = ("_modules", "__dict__", "_orig_mod", "_module")
"""Attributes on the way that are no submodules: PyTorch's, and the one by which `ForwardWrapper` holds its module."""


def path() -> str:
    """Of the module whose code is traced, from the one that is compiled; nothing where that is not known. A graph holds
    it as it is."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    for node in reversed(InstructionTranslator.current_tx().output.graph.nodes):
        if stack := node.meta.get("nn_module_stack"):
            _, *parts = ("".join(found) for found in _PART.findall(list(stack.values())[-1][0]))
            return ".".join(part for part in parts if part not in _NO_NAMES)
    return ""


# See :func:`order_exchanges`.
path._dynamo_marked_constant = True  # type: ignore[attr-defined]
