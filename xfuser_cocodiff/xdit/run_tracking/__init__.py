"""When runs and steps begin and end, and what stock xDiT's collectives move.
Input: progress bars and schedulers of diffusers, and samplers that declare their steps.
Public: `run_tracker.RunTracker`, `run_tracker.Sampling`, `stock_traffic.patches`.
"""
