"""What every record and every report shares.
In: seconds, bytes and shares, and the machine that this process runs on.
Out: `host.header`, `words.time`, `words.size`, `words.percent`, `progress.Teller`.
"""
