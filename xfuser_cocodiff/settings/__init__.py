"""What the user asked for, checked once and the same on every rank.
In: flags, environment variables, and the ranks as the launcher has them.
Out: `options.OPTIONS`, `config.CocoDiffConfig`, `config.resolve`, `placement.Split`, `effect.warnings`.
"""
