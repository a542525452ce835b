"""Module whose import installs the plugin, for scripts that do not rely on the entry point."""

from xfuser_cocodiff import install

install()
