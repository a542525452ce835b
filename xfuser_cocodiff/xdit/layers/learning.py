"""What there is to learn of a kind of layer: where V comes from, and whether V made ahead is V.

Both depend on values, which each rank has its own of, so that the ranks must agree on what was found.
"""

import contextlib
from collections.abc import Callable

import torch
from torch import nn

from xfuser_cocodiff.xdit.layers.call import Call
from xfuser_cocodiff.xdit.layers.kind import Argument, Kind, Trigger
from xfuser_cocodiff.xdit.layers.v_source import Recipe, find_recipe


def learn(kind: Kind, call: Call, module: nn.Module, value: torch.Tensor, agreed: Callable[[object], bool]) -> None:
    """Find out how V came about in a call that was watched.

    Args:
        kind: of the call, to which the answer is added.
        call: with what was noted of it.
        module: the attention module.
        value: V, as it reached USP.
        agreed: whether all ranks pass the same; they call it alike.
    """
    recipe = find_recipe(value, call.submodules)
    arguments: dict[str, Argument] = {}
    trigger, refusal = None, "V does not come from parts of the module in a way that is known"
    if recipe:
        arguments, trigger = _ways_ahead(call, recipe)
        refusal = None if arguments or trigger else "V's projections are given what is made inside the module"
        refusal = _foreign_hooks(module, recipe) or refusal
    if not agreed((recipe, arguments, trigger, refusal)):
        refusal = "the ranks do not agree on where V comes from"
    kind.recipe, kind.arguments, kind.trigger, kind.refusal = recipe, arguments, trigger, refusal
    if trigger:
        kind.given = next(tuple(called.given.shape) for called in call.submodules if called.path in recipe.paths)


def _ways_ahead(call: Call, recipe: Recipe) -> tuple[dict[str, Argument], Trigger | None]:
    """When V could be projected: arguments and trigger of a kind."""
    given = {called.path: called.given for called in call.submodules if called.path in recipe.paths}
    if len(given) == 1:
        [only] = given.values()
        in_block = next(((False, path) for path, tensor in call.before if tensor is only), None)
        in_module = next(((True, called.path) for called in call.submodules if called.given is only), None)
    else:
        in_block = in_module = None
    if in_block:
        return {}, in_block
    found = {
        path: next((key for key, value in call.arguments.items() if value is tensor), None)
        for path, tensor in given.items()
    }
    return ({}, in_module) if None in found.values() else (found, None)


def _foreign_hooks(module: nn.Module, recipe: Recipe) -> str | None:
    """Hooks that would see a projection twice."""
    for path in sorted(recipe.paths):
        submodule = module.get_submodule(path)
        if submodule._forward_hooks or submodule._forward_pre_hooks or hasattr(submodule, "_hf_hook"):
            return f"{path} has hooks of others"
    return None


def rehearse(kind: Kind, call: Call, value: torch.Tensor, agreed: Callable[[object], bool]) -> None:
    """Compare V, as it reached USP, with what was projected ahead; arguments are those of :func:`learn`."""
    if not call.ahead:  # the submodule that it waits for was called before anybody listened
        return
    same = False
    if call.asked == kind.recipe.paths:
        with contextlib.suppress(RuntimeError, IndexError, ValueError):  # other shapes
            same = torch.equal(call.value_ahead(), value)
    # Together, since each rank sees its own values only.
    if not agreed(same) or not same:
        kind.refusal = "V projected ahead is not V as it comes about"
    kind.rehearsed = True
    call.abandon()
