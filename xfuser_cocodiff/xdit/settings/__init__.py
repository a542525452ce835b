"""Options of the plugin: flags and environment variables, validated into one config that is equal on all ranks.
Input: parsed flags, environment variables, and the degrees and detected topology of a run.
Output: `CocoDiffConfig`, and warnings about options without effect.
Public: `options.OPTIONS`, `config.CocoDiffConfig`, `resolve.resolve`, `ring_placement.UlyssesRingSplit`,
`ignored_options.warnings`.
"""
