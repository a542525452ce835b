"""Start and end of runs and steps, and traffic statistics of stock xDiT.
Input: progress bars and schedulers of diffusers, samplers that declare their runs, and xDiT's collectives.
Output: runs and steps of the active session, and calls of listeners such as the recorder.
Public: `run_tracker.RunTracker`, `run_tracker.Sampling`, `stock_traffic.patches`.
"""
