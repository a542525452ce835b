"""What every record and every report shares.
Input: seconds, bytes and shares, and the machine that this process runs on.
Public: `host.header`, `formatting.time`, `formatting.size`, `formatting.percent`,
`progress.ProgressReporter`.
"""
