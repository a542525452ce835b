"""When runs and steps begin and end, and what stock xDiT's collectives move.
In: progress bars and schedulers of diffusers, and samplers that declare their steps.
Out: `run_clock.Clock`, `run_clock.Sampling`, `stock_traffic.patches`.
"""
