"""How the plugin gets into xDiT and out again: options, settings that all ranks share, and the table of patches.
Input: xDiT's parsers and arguments, and the patches of every room above.
Public: `activation.install`, `activation.uninstall`, `activation.run`, `environment.describe`.
"""
