"""What makes the documented figures; run from the repository as `python -m benchmarks.NAME`, and not in the wheel.
Input: the options that --help lists, on this machine, one GPU, or all ranks of a launcher.
Output: tables on the console and records in JSON files.
Public: `a2a.main`, `cluster.__main__.main`, `soak.__main__.main`, `one_gpu.__main__.measure`.
"""
