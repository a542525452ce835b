"""What the user asked for, checked once and the same on every rank.
Input: flags, environment variables, and the ranks as the launcher has them.
Public: `options.OPTIONS`, `config.CocoDiffConfig`, `config.resolve`, `ring_placement.UlyssesRingSplit`,
`ignored_options.warnings`.
"""
