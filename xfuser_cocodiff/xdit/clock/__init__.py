"""When runs and steps begin and end, and a record of them for who asked for one.
In: progress bars and schedulers of diffusers, and samplers that declare their steps.
Out: `run_clock.Clock`, `run_clock.Sampling`, `recorder.Recorder`.
"""
