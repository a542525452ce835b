"""CoCoDiff for xDiT: Ulysses all-to-alls along the machine's topology, as a plugin of xfuser.

Importing this package has no effect. :func:`install` patches xDiT, :func:`uninstall` takes every patch back; both work
before and after xDiT is imported.
"""

__version__ = "0.1.0"

__all__ = ["__version__", "install", "uninstall"]


def install() -> bool:
    """Patch xDiT now, or as soon as it is imported.

    Returns:
        Whether the plugin is in place; False, after one warning, where xDiT is missing or not a supported version.
    """
    from xfuser_cocodiff.xdit import activation

    return activation.install()


def uninstall() -> None:
    """Give every patched site of xDiT its original back."""
    from xfuser_cocodiff.xdit import activation

    activation.uninstall()
