"""A topology bound to process groups: all-to-alls and all-gathers along its axes by any plan, each behind a handle.
In: a group of ranks, a topology, and tensors by destination.
Out: `mesh.Mesh`, `policy.Policy`, `lane.Handle`, `head_group.HeadGroup`, `traffic.Traffic`,
`roll_call.naming_the_lost`.
"""
