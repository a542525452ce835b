"""The scheduler under the name and with the signatures of LingBot-Video's."""

from typing import Any

import torch
from diffusers import UniPCMultistepScheduler


class FlowUniPCMultistepScheduler(UniPCMultistepScheduler):
    sigma_max, sigma_min = 0.999, 0.0

    def __init__(self) -> None:
        super().__init__(prediction_type="flow_prediction", use_flow_sigmas=True)

    def set_timesteps(self, num_inference_steps: int, device: Any = None, sigmas: Any = None, shift: float = 1) -> None:
        assert sigmas is None
        self.register_to_config(flow_shift=shift)
        super().set_timesteps(num_inference_steps, device)

    def step(
        self,
        model_output: torch.Tensor,
        timestep: torch.Tensor,
        sample: torch.Tensor,
        return_dict: bool = True,
        generator: torch.Generator | None = None,
    ) -> Any:
        return super().step(model_output, timestep, sample, return_dict)
