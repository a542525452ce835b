"""What a machine is and what its links cost; nothing here communicates.
Input: what users write, what launchers and drivers say, speeds of links as measured or as published.
Public: `topology.Topology`, `plans.Plan`, `link_profile.Profile`, `planner.choose_plan`, `launcher.detect`,
`devices.capabilities`.
"""
