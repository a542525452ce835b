"""A topology bound to process groups: all-to-alls and all-gathers along its axes by any plan, each behind a handle.
Input: a group of ranks, a topology, and tensors by destination.
Public: `mesh.Mesh`, `policy.PlanPolicy`, `comm_stream.Handle`, `head_group.HeadGroup`, `traffic.Traffic`,
`failure_detection.report_failed_ranks`.
"""
