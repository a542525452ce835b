"""`cocodiff bench cluster`: steps of full-size models on emulated clusters, against the rules of other systems.
Input: models, machines and variants: stock, the plugin's modes, and rules that replace stock's collectives.
Output: step times, exposed communication and bytes of each variant.
Public: `benchmark.run`, `benchmark.run_all`, `report.show`, `frontier_chart.draw`, `rules.Rule`,
`rules.RULES`, `stock_splits.rank_stock_splits`.
"""
