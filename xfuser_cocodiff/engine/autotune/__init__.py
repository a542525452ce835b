"""Link measurement, plan selection and the cache of tuning results.
Input: a group of ranks, its config, and the results of an earlier process.
Output: a mesh with a plan for each message size, and its slow axes.
Public: `comm_setup.set_up_comm`, `link_probe.Probe`, `tuning_cache.TuningCache`.
"""
