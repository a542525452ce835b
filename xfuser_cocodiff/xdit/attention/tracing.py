"""The layer that Dynamo is tracing."""

import re

from xfuser_cocodiff.xdit.layers.layers import is_wrapper
from xfuser_cocodiff.xdit.layers.module_stack import running_modules
from xfuser_cocodiff.xdit.layers.root_module import layer_name
from xfuser_cocodiff.xdit.session.session import active

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


def has_lossless_layer() -> bool:
    """Return whether the schedule makes the traced layer lossless, or another one that has the same graph: those at the
    same path in modules of the same class. It is a constant of a graph."""
    running, path = [module for module in running_modules() if not is_wrapper(module)], traced_path()
    if not running:  # the graph runs outside of any module, and its layer is unknown
        return True
    transformer = running[-1]
    names = {module: name for name, module in transformer.named_modules()}
    compiled = next(module for module in running if module in names)
    outers = [name for module, name in names.items() if type(module) is type(compiled)]
    schedule = active().runtime.schedule
    return any(schedule.is_lossless_layer(layer_name(transformer, outer, path)) for outer in outers)


# See :func:`add_send_pass`.
has_lossless_layer._dynamo_marked_constant = True  # type: ignore[attr-defined]
traced_path._dynamo_marked_constant = True  # type: ignore[attr-defined]
