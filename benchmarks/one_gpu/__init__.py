"""Facts about the plugin that only a GPU can tell, in three parts for a machine that is lent for minutes.
Input: one GPU of NVIDIA, and a folder; `tests/benchmarks/one_gpu/dry_run.py` runs it on a CPU.
Output: lines of JSON in the folder's facts.jsonl, each written as soon as it is known; see docs/maintainers.md.
Public: `__main__.measure`.
"""
