"""What the plugin may change in a process, to compare before and after. Import it after xDiT."""

import logging
import os
import sys
from typing import Any

import xfuser


def everything() -> dict[str, Any]:
    """Return identities of all that the plugin may patch, and the state of this process that it may change."""
    from torch._inductor import config as inductor

    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] not in ("xfuser", "diffusers", "yunchang", "torch"):
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = id(value)
            watched = "xfuser", "diffusers.pipelines.pipeline_u", "diffusers.modular_pipelines.modular_p"
            if isinstance(value, type) and name.startswith(watched):
                for member, each in list(vars(value).items()):
                    if callable(each) or member == "__dataclass_fields__":
                        found[f"{name}.{key}.{member}"] = id(each)
    ours = logging.getLogger("xfuser_cocodiff")
    found["logging"] = [[*each.handlers, each.level] for each in (ours, logging.getLogger())]
    found["process"] = [dict(os.environ), list(sys.meta_path), sys.excepthook, list(sys.path_hooks)]
    found["inductor"] = [
        inductor.reorder_for_compute_comm_overlap,
        list(inductor.reorder_for_compute_comm_overlap_passes),
    ]
    found["packages_info"] = id(xfuser.envs.PACKAGES_CHECKER.packages_info)
    return found
