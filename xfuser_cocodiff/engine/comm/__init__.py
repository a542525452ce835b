"""Process groups of a topology: all-to-alls and all-gathers along its axes, asynchronous, each behind a handle.
Input: a group of ranks, a topology, a plan, and tensors by destination.
Output: the tensors received from the other ranks, traffic statistics, and the names of ranks that failed.
Public: `mesh.Mesh`, `policy.PlanPolicy`, `comm_stream.Handle`, `head_group.HeadGroup`, `traffic.Traffic`,
`packing.pack`, `packing.unpack`, `failure_detection.report_failed_ranks`.
"""
