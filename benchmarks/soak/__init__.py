"""Soak test: random requests and faults in one process group, each request compared with a fresh process.
Input: a seed.
Output: a record of requests that failed, had other bits or hung, and of what the ranks hold over time.
Public: `campaign.run`, `job.Job`.
"""
