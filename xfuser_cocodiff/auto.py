"""Importing this module installs the plugin: the explicit door, for scripts that do not rely on the entry point."""

from xfuser_cocodiff import install

install()
