"""Facts about the plugin that only a GPU can tell, in three stages for a machine that is lent for minutes.
Input: one GPU, and NCCL 2.30 or later for several ranks on it; without a GPU a dry run with toy sizes.
Output: a line of JSON after every fact, and an archive for each stage; docs/one_gpu_facts.md says what each decides.
Public: `stages.STAGES`, `runner.run_stage`, `rank_launch.launch`.
"""
