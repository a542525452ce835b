"""What a machine is and what its links cost; nothing here communicates.
In: what users write, what launchers and drivers say, speeds of links as measured or as published.
Out: `topology.Topology`, `plan.Plan`, `profile.Profile`, `planner.choose`, `launcher.detect`, `device.of`.
"""
