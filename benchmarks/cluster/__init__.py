"""Predicted steps of full-size models on known clusters: stock, the plugin's modes, and rules of other systems.
Input: models, machines and variants.
Output: step times, exposed communication and bytes of each variant, from steps recorded on an emulated accelerator.
Public: `rows.predict_cell`, `rules.running`, `variants.parse`, `tables.main`.
"""
