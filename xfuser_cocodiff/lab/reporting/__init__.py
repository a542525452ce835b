"""Formatting of figures, headers of records and progress lines, shared by all commands.
Input: seconds, bytes, fractions, and the machine that this process runs on.
Output: formatted figures, the header of a record, and progress lines on a terminal or in a log.
Public: `host.header`, `formatting.format_seconds`, `formatting.format_median_range`, `formatting.format_bytes`,
`formatting.format_percent`, `formatting.format_db`, `progress.ProgressReporter`.
"""
