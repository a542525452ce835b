"""Formatting of figures, headers of records, and the facts of this machine.
Input: seconds, bytes, fractions, and the machine that this process runs on.
Output: formatted figures, the header of a record, and what `cocodiff env` prints.
Public: `environment.describe`, `record_header.header`, `formatting.format_seconds`, `formatting.format_median_range`,
`formatting.format_bytes`, `formatting.format_percent`, `formatting.format_db`.
"""
