"""Start and end of runs and steps.
Input: progress bars and schedulers of diffusers, and samplers that declare their runs.
Output: runs and steps of the active session, and calls of listeners such as the recorder.
Public: `run_tracker.RunTracker`, `run_tracker.Sampling`.
"""
