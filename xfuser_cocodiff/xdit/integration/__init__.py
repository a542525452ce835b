"""Integration into xDiT: options, one config for all ranks, and installation of all patches.
Input: xDiT's parsers and arguments, and the patches of all packages of `xdit`.
Output: a patched xDiT whose parallel config holds the config of the plugin.
Public: `activation.install`, `activation.uninstall`, `activation.run`.
"""
