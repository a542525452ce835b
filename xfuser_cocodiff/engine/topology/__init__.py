"""Topology of a machine, costs of its links, and plans for collectives; nothing here communicates.
Input: options, variables of launchers, device names, and link speeds, measured or published.
Output: a topology, a link profile, and the fastest plan for a message size.
Public: `topology.Topology`, `plans.Plan`, `link_profile.Profile`, `planner.choose_plan`, `launcher.detect`,
`devices.capabilities`.
"""
